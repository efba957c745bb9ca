// The drawer with the system prompt, the sampling and the key.

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_tokens", "seed",
];

/** The fields of a request that the settings ask for; what was left open is the model's own. */
export function samplingOf(settings) {
  const fields = {};
  for (const name of NUMBERS) if (Number.isFinite(settings[name])) fields[name] = settings[name];
  const stops = String(settings.stop ?? "").split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  if (stops.length) fields.stop = stops;
  return fields;
}

/** Binds the drawer's form. changed: called with {system}, {key, keepKey} or {settings} as the person changes them. */
export class Settings {
  #dialog;
  #form;
  #settings;

  constructor(dialog, settings, { key, keepKey }, changed) {
    this.#dialog = dialog;
    this.#form = dialog.querySelector("form");
    this.#settings = settings;
    const fields = this.#form.elements;
    for (const name of NUMBERS) fields[name].value = Number.isFinite(settings[name]) ? settings[name] : "";
    fields.stop.value = settings.stop ?? "";
    fields.key.value = key;
    fields.keepKey.checked = keepKey;
    this.#form.addEventListener("input", ({ target }) => changed(this.#read(target)));
    this.#form.addEventListener("reset", () => setTimeout(() => changed(this.#cleared(fields))));
    dialog.addEventListener("click", ({ target }) => target === dialog && dialog.close());
  }

  /** Open the drawer, at the field of that name. */
  open(system, field = "system") {
    this.#form.elements.system.value = system;
    this.#dialog.showModal();
    this.#form.elements[field].focus();
  }

  #read({ name, value, valueAsNumber }) {
    const fields = this.#form.elements;
    if (name === "system") return { system: value };
    if (name === "key" || name === "keepKey") return { key: fields.key.value.trim(), keepKey: fields.keepKey.checked };
    this.#settings[name] = NUMBERS.includes(name) ? (Number.isNaN(valueAsNumber) ? null : valueAsNumber) : value;
    return { settings: this.#settings };
  }

  #cleared(fields) {
    for (const name of NUMBERS) {
      this.#settings[name] = null;
      fields[name].value = "";
    }
    this.#settings.stop = fields.stop.value = "";
    return { settings: this.#settings };
  }
}
