// The reference: openapi.json, to read. Everything in it goes onto the page as text.

import { copyButton, el } from "../chat/dom.js";

const REFERENCE = "#/components/schemas/";
const DEEPEST = 4;

const $ = (id) => document.getElementById(id);

/** The page of one document. */
class Reference {
  constructor(document) {
    this.document = document;
  }

  groups() {
    return this.document.tags.map(({ name }) => {
      const endpoints = [...this.#operations()].filter(({ operation }) => operation.tags.includes(name));
      return el("section", {}, el("h2", {}, name), ...endpoints.map((each) => this.#endpoint(each)));
    });
  }

  *#operations() {
    for (const [path, methods] of Object.entries(this.document.paths)) {
      for (const [method, operation] of Object.entries(methods)) yield { method, path, operation };
    }
  }

  #endpoint({ method, path, operation }) {
    const summary = el("summary", {},
      el("span", { class: `method ${method}` }, method.toUpperCase()),
      el("code", {}, path),
      el("span", { class: "said" }, operation.summary));
    const body = el("div", { class: "body" });
    const shown = el("details", { class: "endpoint" }, summary, body);
    shown.dataset.words = [method, path, operation.summary, ...this.#names(operation)].join(" ").toLowerCase();
    shown.addEventListener("toggle", () => shown.open && !body.firstChild && body.append(...this.#parts(method, path, operation)));
    return shown;
  }

  /** The names of an endpoint's fields, to be found by. */
  #names(operation) {
    const schemas = variants(operation.requestBody?.content["application/json"].schema);
    return schemas.flatMap((schema) => Object.keys(this.#resolved(schema).properties ?? {}));
  }

  *#parts(method, path, operation) {
    yield el("p", { class: "said" }, access(operation));
    if (operation.parameters) {
      yield el("h3", {}, "Path and query parameters");
      yield el("div", { class: "fields" }, el("table", {}, el("tbody", {}, ...operation.parameters.map((each) =>
        el("tr", {}, el("td", {}, el("code", {}, each.name)), el("td", {}, each.description ?? "path parameter"))))));
    }
    const asked = operation.requestBody?.content["application/json"];
    for (const schema of variants(asked?.schema)) {
      yield el("h3", {}, "Body");
      yield* this.#fields(this.#resolved(schema), 0);
    }
    if (method === "post" || asked) {
      yield el("h3", {}, "Request");
      yield* examples(asked).map((example) => curl(method, path, example));
    }
    yield* this.#answers(operation.responses);
  }

  *#answers(responses) {
    for (const [media, content] of Object.entries(responses["200"]?.content ?? {})) {
      yield el("h3", {}, content["x-event"] ? `Stream event (${media})` : `Answer (${media})`);
      for (const schema of variants(content["x-event"] ?? content.schema)) {
        const found = this.#resolved(schema);
        if (found.properties) yield* this.#fields(found, 0);
        else yield el("p", {}, el("code", {}, this.#type(schema)));
      }
    }
    yield el("h3", {}, "Errors");
    for (const schema of variants(responses.default.content["application/json"].schema)) {
      yield* this.#fields(this.#resolved(schema), 0);
    }
  }

  /** The fields of an object: a table, what it is about, what is refused, and the objects within. */
  *#fields(schema, depth) {
    if (schema.description) yield el("p", { class: "said" }, schema.description);
    const fields = Object.entries(schema.properties ?? {});
    const refused = fields.filter(([, field]) => field["x-refused"]);
    const taken = fields.filter(([, field]) => !field["x-refused"]);
    if (taken.length) yield this.#table(taken, new Set(schema.required ?? []));
    for (const [name, field] of taken) {
      for (const inner of this.#objects(field)) {
        if (depth >= DEEPEST) continue;
        const folded = el("details", {}, el("summary", {}, `${name}: ${inner.name}`));
        folded.addEventListener("toggle", () => folded.open && folded.children.length === 1 && folded.append(...this.#fields(inner.schema, depth + 1)));
        yield folded;
      }
    }
    if (refused.length) yield el("details", {}, el("summary", {}, `${refused.length} unsupported parameters`), refusals(refused));
  }

  #table(fields, needed) {
    const inOrder = [...fields.filter(([name]) => needed.has(name)), ...fields.filter(([name]) => !needed.has(name))];
    const rows = inOrder.map(([name, field]) => {
      const initial = field.default ?? null;
      return el("tr", {},
        el("td", {}, el("code", {}, name), needed.has(name) ? el("span", { class: "needed" }, " required") : ""),
        el("td", {}, el("code", {}, this.#type(field))),
        el("td", {}, [initial === null ? "" : `${JSON.stringify(initial)} by default`, field.description ?? ""].filter(Boolean).join(". ")));
    });
    return el("div", { class: "fields" }, el("table", {}, el("tbody", {}, ...rows)));
  }

  /** What a value may be, in a few words. */
  #type(schema) {
    if (schema.$ref) return schema.$ref.slice(REFERENCE.length);
    if (schema.anyOf) return schema.anyOf.filter(({ type }) => type !== "null").map((each) => this.#type(each)).join(" or ");
    if (schema.enum) return schema.enum.filter((value) => value !== null).map((value) => JSON.stringify(value)).join(" or ");
    if ("const" in schema) return JSON.stringify(schema.const);
    if (schema.type === "array") return `[${schema.items ? this.#type(schema.items) : "anything"}]`;
    const { minimum, maximum } = schema;
    const range = minimum === undefined ? (maximum === undefined ? "" : ` up to ${maximum}`) : maximum === undefined ? ` from ${minimum}` : ` ${minimum} to ${maximum}`;
    return `${schema.type ?? "anything"}${range}`;
  }

  /** The objects that a field may hold. */
  #objects(field) {
    return [field, field.items, ...variants(field), ...variants(field.items)]
      .flatMap((schema) => (schema?.items?.$ref ? [schema.items] : [schema]))
      .filter((schema, at, all) => schema?.$ref && all.findIndex((other) => other?.$ref === schema.$ref) === at)
      .map((schema) => ({ name: this.#type(schema), schema: this.#resolved(schema) }))
      .filter(({ schema }) => schema.properties);
  }

  #resolved(schema) {
    return schema.$ref ? this.document.components.schemas[schema.$ref.slice(REFERENCE.length)] : schema;
  }
}

const variants = (schema) => (schema ? (schema.anyOf ?? [schema]) : []);

function access(operation) {
  if (operation.security?.length === 0) return "No key is needed.";
  const scope = operation["x-scope"];
  return scope ? `Needs a key with scope ${scope}, if the server requires keys.` : "Needs any key, if the server requires keys.";
}

function refusals(refused) {
  const rows = refused.map(([name, field]) => {
    const neutral = field.enum.filter((value) => value !== null).map((value) => JSON.stringify(value)).join(", ");
    return el("tr", {}, el("td", {}, el("code", {}, name)), el("td", {}, field.description), el("td", {}, neutral ? `${neutral} has no effect` : ""));
  });
  return el("div", { class: "fields" }, el("table", {}, el("tbody", {}, ...rows)));
}

function examples(asked) {
  if (!asked) return [null];
  const several = Object.values(asked.examples ?? {}).map(({ value }) => value);
  return asked.example ? [asked.example] : several.length ? several : [{}];
}

function curl(method, path, example) {
  const address = new URL(`..${path}`, import.meta.url).href.replaceAll("%7B", "{").replaceAll("%7D", "}");
  const body = example === null ? "" : ` \\\n  -H "Content-Type: application/json" \\\n  -d '${JSON.stringify(example).replaceAll("'", "'\\''")}'`;
  const line = `curl ${method === "post" ? "" : `-X ${method.toUpperCase()} `}${address}${method === "post" && !body ? " -X POST" : ""}${body}`;
  return el("div", { class: "curl" }, el("pre", { tabindex: "0", "aria-label": "An example" }, line), copyButton("Copy command", () => line));
}

function filter() {
  const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  let left = 0;
  for (const section of $("groups").children) {
    let here = 0;
    for (const endpoint of section.querySelectorAll(".endpoint")) {
      endpoint.hidden = !words.every((word) => endpoint.dataset.words.includes(word));
      if (!endpoint.hidden) here++;
    }
    section.hidden = here === 0;
    left += here;
  }
  $("nothing").hidden = left > 0;
}

async function start() {
  try {
    const response = await fetch(new URL("../openapi.json", import.meta.url), { credentials: "omit" });
    const found = await response.json();
    if (!response.ok) throw new Error(found.error?.message ?? response.statusText);
    $("version").textContent = found.info.version;
    $("about").append(...found.info.description.trim().split("\n\n").map((part) => el("p", {}, part)));
    $("groups").append(...new Reference(found).groups());
  } catch (error) {
    $("failure").textContent = `Cannot load the API description: ${error.message}`;
    $("failure").hidden = false;
  }
  $("filter").addEventListener("input", filter);
  document.body.dataset.ready = "true";
}

start();
