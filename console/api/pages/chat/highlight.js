// Colours for code: a few token kinds, found by one regular expression for each family of languages.

const words = (text) => new Set(text.split(" "));

const C_COMMENT = String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)`;
const HASH_COMMENT = String.raw`#[^\n]*`;
const QUOTED = String.raw`"(?:\\[^]|[^"\\\n])*"?|'(?:\\[^]|[^'\\\n])*'?`;
const BACKTICKED = String.raw`\`(?:\\[^]|[^\`\\])*\`?`;
const TRIPLE = String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)`;
const NUMBER = String.raw`\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.[\d_]+)?(?:[eE][+-]?\d+)?)[a-zA-Z]*\b`;
const NAME = String.raw`[A-Za-z_$][\w$]*`;

function family(comment, string, keywords, { ignoreCase = false } = {}) {
  const source = `(?<comment>${comment})|(?<string>${string})|(?<number>${NUMBER})|(?<name>${NAME})`;
  return { pattern: new RegExp(source, "g"), keywords: words(keywords), ignoreCase };
}

const CONTROL = "break case catch class const continue default do else enum for if new return static switch throw try while";
const SCRIPT = family(C_COMMENT, `${QUOTED}|${BACKTICKED}`,
  `${CONTROL} abstract as async await debugger declare delete export extends false finally from function get implements import in instanceof interface let namespace null of private protected public readonly satisfies set super this true type typeof undefined var void with yield`);
const PYTHON = family(HASH_COMMENT, `[rbfuRBFU]{0,2}(?:${TRIPLE}|${QUOTED})`,
  "and as assert async await break case class continue def del elif else except False finally for from global if import in is lambda match None nonlocal not or pass raise return True try while with yield self");
const C = family(`${C_COMMENT}|^[ \\t]*#[^\\n]*`, QUOTED,
  `${CONTROL} auto bool char concept constexpr consteval decltype delete double explicit extern false float friend goto inline int long mutable namespace noexcept nullptr operator override private protected public register short signed sizeof size_t struct template this true typedef typename union unsigned using virtual void volatile`);
C.pattern = new RegExp(C.pattern.source, "gm");
const JAVA = family(C_COMMENT, `${TRIPLE}|${QUOTED}`,
  `${CONTROL} abstract base bool boolean byte char data double extends false final finally float foreach fun get implements import in instanceof int interface internal is long namespace null object open override package private protected public readonly record sealed set short string super suspend synchronized this throws transient true using val var virtual void volatile when async await`);
const GO = family(C_COMMENT, `${QUOTED}|${BACKTICKED}`,
  "any bool break byte case chan const continue default defer else error fallthrough false float32 float64 for func go goto if import int int32 int64 interface map nil package range return rune select string struct switch true type uint var");
const RUST = family(C_COMMENT, String.raw`r#*"[^]*?"#*|"(?:\\[^]|[^"\\])*"?|'(?:\\[^\n]+?|[^'\\\n])'`,
  "as async await bool break char const continue crate dyn else enum extern f32 f64 false fn for i32 i64 if impl in let loop match mod move mut pub ref return self Self static str struct super trait true type u8 u32 u64 unsafe use usize where while");
const SHELL = family(String.raw`(?<![\w$])#[^\n]*`, String.raw`"(?:\\[^]|[^"\\])*"?|'[^']*'?|\$\{[^}\n]*\}|\$\w+`,
  "if then else elif fi for while until do done case esac in function select return exit export local readonly declare set unset source alias cd echo eval exec sudo trap shift");
const SQL = family(String.raw`--[^\n]*|\/\*[^]*?(?:\*\/|$)`, QUOTED,
  "add all alter and as asc avg begin between by case check column commit constraint count create cross default delete desc distinct drop else end exists false foreign from full group having if in index inner insert int integer into is join key left like limit max min not null offset on or order outer over partition primary references returning right rollback select set sum table text then true union unique update using values varchar view when where with",
  { ignoreCase: true });
const JSON_LIKE = family(C_COMMENT, String.raw`"(?:\\[^]|[^"\\\n])*"?`, "true false null");
JSON_LIKE.keys = /^\s*:/;
const YAML = family(HASH_COMMENT, QUOTED, "true false null yes no on off");
YAML.keys = /^ *[:=](?:\s|$)/;
const CSS = family(String.raw`\/\*[^]*?(?:\*\/|$)`, QUOTED, "important");
CSS.pattern = new RegExp(CSS.pattern.source.replace(NAME, String.raw`[@.#]?-{0,2}[A-Za-z_][\w-]*`), "g");
CSS.keys = /^\s*:\s/;
const MARKUP = { pattern: /(?<comment><!--[^]*?(?:-->|$))|(?<keyword><\/?[A-Za-z][\w:.-]*|\/?>)|(?<string>"[^"<]*"|'[^'<]*')|(?<call>[\w:-]+(?==["']))/g };
const DIFF = { pattern: /(?<comment>^(?:diff|index|---|\+\+\+|@@)[^\n]*)|(?<added>^\+[^\n]*)|(?<removed>^-[^\n]*)/gm };

const LANGUAGES = new Map(Object.entries({
  js: SCRIPT, javascript: SCRIPT, jsx: SCRIPT, mjs: SCRIPT, ts: SCRIPT, tsx: SCRIPT, typescript: SCRIPT,
  py: PYTHON, python: PYTHON, python3: PYTHON,
  c: C, h: C, cc: C, cpp: C, "c++": C, hpp: C, cuda: C, cu: C,
  java: JAVA, kotlin: JAVA, kt: JAVA, cs: JAVA, csharp: JAVA, "c#": JAVA,
  go: GO, golang: GO, rs: RUST, rust: RUST,
  sh: SHELL, bash: SHELL, shell: SHELL, zsh: SHELL, console: SHELL, dockerfile: SHELL, makefile: SHELL,
  sql: SQL, json: JSON_LIKE, jsonc: JSON_LIKE, json5: JSON_LIKE, yaml: YAML, yml: YAML, toml: YAML, ini: YAML,
  css: CSS, scss: CSS, html: MARKUP, xml: MARKUP, svg: MARKUP, vue: MARKUP, diff: DIFF, patch: DIFF,
}));

/** Longer code stays plain: what is gained is not worth the wait. */
const MAX_CHARS = 60_000;

/** The pieces of code: [kind, text], kind null for plain text. Together they are the code again. */
export function pieces(code, language) {
  const rules = LANGUAGES.get(language.toLowerCase());
  if (!rules || code.length > MAX_CHARS) return [[null, code]];
  const found = [];
  let end = 0;
  for (const match of code.matchAll(rules.pattern)) {
    if (match.index > end) found.push([null, code.slice(end, match.index)]);
    end = match.index + match[0].length;
    found.push([kindOf(match, rules, code, end), match[0]]);
  }
  if (end < code.length) found.push([null, code.slice(end)]);
  return found;
}

function kindOf({ groups }, rules, code, end) {
  const [kind, text] = Object.entries(groups).find(([, value]) => value !== undefined);
  const ahead = code.slice(end, end + 8);
  if (rules.keys && (kind === "name" || kind === "string") && rules.keys.test(ahead)) return "call";
  if (kind !== "name") return kind;
  if (rules.keywords.has(rules.ignoreCase ? text.toLowerCase() : text)) return "keyword";
  return /^\s*\(/.test(ahead) ? "call" : null;
}
