// Markdown as models write it, into DOM nodes. The text is only ever put in as text; of HTML there is none, and an
// address becomes a link where it is http, https or mailto alone. Pictures become links: nothing is fetched.

import { copyButton, el } from "./dom.js";
import { pieces } from "./highlight.js";

const DEEPEST = 8; // quotes and lists in one another; beyond that, text
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s(.*)$/;
const CLOSING = /(?:^|\s)#+$/; // of a heading, where a space sets it apart
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?: +|$)/;
const TASK = /^\[([ xX])\] /;
const DELIMITERS = /^\|?\s*:?-+:?(?:\s*\|\s*:?-+:?)*(?:\s*\|)?$/;

/** Show `text` in `box`, recreating only the blocks that changed. */
export function showMarkdown(box, text) {
  const wanted = blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0);
  const before = box.shown ?? [];
  let same = 0;
  while (same < before.length && same < wanted.length && before[same] === wanted[same].source) same++;
  while (box.childNodes.length > same) box.lastChild.remove();
  box.append(...wanted.slice(same).map(render));
  box.shown = wanted.map((block) => block.source);
}

/** The blocks of some lines: {kind, source, ...}. source: the block's lines, and what else its looks depend on. */
function blocks(lines, depth) {
  const found = [];
  for (let i = 0; i < lines.length; ) {
    if (!lines[i].trim()) {
      i++;
      continue;
    }
    const block = readBlock(lines, i, depth);
    found.push({ ...block, source: `${block.kind}\n${lines.slice(i, block.end).join("\n")}` });
    i = block.end;
  }
  return found;
}

function readBlock(lines, i, depth) {
  const line = lines[i];
  let match;
  if ((match = FENCE.exec(line))) return readCode(lines, i, match);
  if ((match = HEADING.exec(line))) return { kind: "heading", level: match[1].length, text: match[2].trim().replace(CLOSING, "").trim(), end: i + 1 };
  if (RULE.test(line)) return { kind: "rule", end: i + 1 };
  if (depth < DEEPEST && QUOTE.test(line)) return readQuote(lines, i, depth);
  if (depth < DEEPEST && ITEM.test(line)) return readList(lines, i, depth);
  if (line.includes("|") && DELIMITERS.test((lines[i + 1] ?? "").trim())) return readTable(lines, i);
  return readParagraph(lines, i, depth);
}

function readCode(lines, i, [line, fence, info]) {
  const indent = line.length - line.trimStart().length;
  let end = i + 1;
  const isClosing = (text) => text.trim().startsWith(fence) && !text.trim().replaceAll(fence[0], "");
  while (end < lines.length && !isClosing(lines[end])) end++;
  const code = lines.slice(i + 1, end).map((text) => text.replace(new RegExp(`^ {0,${indent}}`), ""));
  return { kind: "code", language: info.trim().split(/[\s{,]/, 1)[0], text: code.join("\n"), end: Math.min(end + 1, lines.length) };
}

function readQuote(lines, i, depth) {
  let end = i;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  return { kind: "quote", blocks: blocks(lines.slice(i, end).map((line) => line.replace(QUOTE, "")), depth + 1), end };
}

function readList(lines, i, depth) {
  const first = ITEM.exec(lines[i]);
  const ordered = /\d/.test(first[2]);
  const items = [];
  let end = i;
  for (let match; (match = ITEM.exec(lines[end] ?? "")) && /\d/.test(match[2]) === ordered && !RULE.test(lines[end]); ) {
    const begin = end++;
    const indent = Math.min(match[0].length, match[1].length + match[2].length + 1);
    const belongs = (line) => line !== undefined && line.search(/\S/) >= indent;
    while (end < lines.length) {
      if (!lines[end].trim()) {
        if (!belongs(lines.slice(end).find((line) => line.trim()))) break;
      } else if (!belongs(lines[end]) && (startsBlock(lines[end]) || !lines[end - 1].trim())) break;
      end++;
    }
    const own = [lines[begin].slice(match[0].length), ...lines.slice(begin + 1, end).map((line) => unindented(line, indent))];
    const task = TASK.exec(own[0]);
    if (task) own[0] = own[0].slice(task[0].length);
    items.push({ blocks: blocks(own, depth + 1), done: task ? task[1] !== " " : null });
    let next = end;
    while (next < lines.length && !lines[next].trim()) next++;
    if (ITEM.test(lines[next] ?? "")) end = next;
  }
  return { kind: "list", ordered, start: ordered ? parseInt(first[2], 10) : 1, items, end };
}

const unindented = (line, indent) => line.slice(Math.min(indent, Math.max(0, line.search(/\S|$/))));

function readTable(lines, i) {
  let end = i + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  const sides = cells(lines[i + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : null));
  const head = cells(lines[i]);
  const rows = lines.slice(i + 2, end).map(cells).map((row) => head.map((_, at) => row[at] ?? ""));
  return { kind: "table", head, rows, sides, end };
}

const cells = (line) =>
  line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

const startsBlock = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));

function readParagraph(lines, i, depth) {
  let end = i + 1;
  while (end < lines.length && lines[end].trim() && !(startsBlock(lines[end]) && depth < DEEPEST)) end++;
  return { kind: "paragraph", text: lines.slice(i, end).map((line) => line.trimStart()).join("\n"), end };
}

function render(block) {
  switch (block.kind) {
    case "code":
      return renderCode(block);
    case "heading": // the page has headings of its own above these
      return el(`h${Math.min(6, block.level + 2)}`, { class: `level-${block.level}` }, inline(block.text));
    case "rule":
      return el("hr");
    case "quote":
      return el("blockquote", {}, ...block.blocks.map(render));
    case "list":
      return el(block.ordered ? "ol" : "ul", { start: block.ordered ? block.start : null }, ...block.items.map(renderItem));
    case "table":
      return renderTable(block);
    default:
      return el("p", {}, inline(block.text));
  }
}

function renderCode({ language, text }) {
  const code = el("code", {}, ...pieces(text, language).map(([kind, part]) => (kind ? el("span", { class: kind }, part) : part)));
  const head = el("figcaption", {}, el("span", {}, language || "text"), copyButton("Copy this code", () => text));
  return el("figure", { class: "code" }, head, el("pre", { tabindex: "0", "aria-label": `Code, ${language || "text"}` }, code));
}

function renderItem({ blocks: inner, done }) {
  const tight = inner[0]?.kind === "paragraph";
  const box = done === null ? [] : [el("input", { type: "checkbox", disabled: true, checked: done, "aria-label": done ? "done" : "to do" })];
  const first = tight ? [inline(inner[0].text)] : [];
  return el("li", { class: done === null ? null : "task" }, ...box, ...first, ...inner.slice(tight ? 1 : 0).map(render));
}

function renderTable({ head, rows, sides }) {
  const cell = (tag) => (text, i) => el(tag, { class: sides[i] ? `to-${sides[i]}` : null }, inline(text));
  const top = el("thead", {}, el("tr", {}, ...head.map(cell("th"))));
  const body = el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map(cell("td")))));
  return el("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, el("table", {}, top, body));
}

const LINK = /^\[((?:\\.|[^\[\]\\]){0,500})\]\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+["'][^"'\n]*["'])?\s*\)/;
const ADDRESS = /^https?:\/\/[^\s<>"'`]*[^\s<>"'`.,:;!?)\]}*_~]/;
const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const SPECIAL = /[\\`*_~[!<\n]|https?:\/\//g;

/** The nodes of a line or several. */
function inline(text, depth = 0) {
  const found = document.createDocumentFragment();
  const unclosed = new Set(); // marks of which it is known that no closing one follows
  let at = 0;
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    if (next > at) found.append(text.slice(at, next));
    if (next === text.length) break;
    const [node, end] = span(text, next, depth, unclosed);
    found.append(node);
    at = end;
  }
  return found;
}

/** What begins at a special character: a node or text, and where it ends. */
function span(text, at, depth, unclosed) {
  const character = text[at];
  const plain = [character, at + 1];
  switch (character) {
    case "\n":
      return / {2}$/.test(text.slice(Math.max(0, at - 2), at)) ? [el("br"), at + 1] : plain;
    case "\\":
      if (text[at + 1] === "\n") return [el("br"), at + 2];
      return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? [text[at + 1], at + 2] : plain;
    case "`":
      return codeSpan(text, at, unclosed);
    case "!":
      return text[at + 1] === "[" ? (link(text, at + 1, depth, true) ?? plain) : plain;
    case "[":
      return link(text, at, depth, false) ?? plain;
    case "<":
      return bracketed(text, at) ?? breakTag(text, at) ?? plain;
    case "h": {
      const address = addressAt(text, at);
      return address ? [anchor(address, address), at + address.length] : plain;
    }
    default:
      return emphasis(text, at, depth, unclosed) ?? plain;
  }
}

/** The bare address there; a parenthesis ends it unless it was opened within. */
function addressAt(text, at) {
  const found = ADDRESS.exec(text.slice(at, at + 2000))?.[0];
  return found && text[at + found.length] === ")" && found.lastIndexOf("(") > found.lastIndexOf(")") ? `${found})` : found;
}

function codeSpan(text, at, unclosed) {
  const run = /^`+/.exec(text.slice(at))[0];
  const end = unclosed.has(run) ? -1 : closingRun(text, at + run.length, run);
  if (end < 0) {
    unclosed.add(run);
    return [run, at + run.length];
  }
  const code = text.slice(at + run.length, end).replaceAll("\n", " ");
  return [el("code", {}, /^ .*\S.* $/.test(code) ? code.slice(1, -1) : code), end + run.length];
}

function closingRun(text, from, run) {
  for (let end = text.indexOf(run, from); end >= 0; end = text.indexOf(run, end)) {
    let after = end + run.length;
    if (text[after] !== "`") return end;
    while (text[after] === "`") after++;
    end = after;
  }
  return -1;
}

function emphasis(text, at, depth, unclosed) {
  const [mark, tag] = MARKS.find(([mark]) => text.startsWith(mark, at)) ?? [];
  if (!mark || depth >= DEEPEST || unclosed.has(mark)) return null;
  const within = (place) => mark[0] === "_" && /[\p{L}\p{N}]/u.test(text[place] ?? ""); // snake_case is no emphasis
  if (!/\S/.test(text[at + mark.length] ?? "") || within(at - 1)) return null;
  for (let end = text.indexOf(mark, at + mark.length + 1); end >= 0; end = text.indexOf(mark, end + 1)) {
    const doubled = mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark);
    const longer = mark.length === 2 && text[end + 2] === mark[0]; // ***: the inner one closes first
    if (/\s/.test(text[end - 1]) || text[end - 1] === "\\" || doubled || longer || within(end + mark.length)) continue;
    return [el(tag, {}, inline(text.slice(at + mark.length, end), depth + 1)), end + mark.length];
  }
  unclosed.add(mark);
  return null;
}

function link(text, at, depth, isPicture) {
  const match = LINK.exec(text.slice(at, at + 4000));
  if (!match || depth >= DEEPEST) return null;
  const inner = match[1] ? inline(match[1], DEEPEST) : match[2];
  const target = anchor(match[2], inner, isPicture);
  return target ? [target, at + match[0].length] : null;
}

function bracketed(text, at) {
  const match = /^<((?:https?:\/\/|mailto:)[^\s<>]+)>/.exec(text.slice(at, at + 2000));
  const target = match && anchor(match[1], match[1]);
  return target ? [target, at + match[0].length] : null;
}

function breakTag(text, at) {
  const match = /^<br\s*\/?>/i.exec(text.slice(at, at + 10));
  return match && [el("br"), at + match[0].length];
}

/** A link, null where the address is none that may be followed. */
function anchor(address, inner, isPicture = false) {
  if (!URL.canParse(address) || !["http:", "https:", "mailto:"].includes(new URL(address).protocol)) return null;
  return el("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, isPicture ? "Picture: " : "", inner);
}
