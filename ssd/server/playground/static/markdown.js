// Markdown to elements of the page. HTML in a text stays text, images become links: nothing is fetched.
"use strict";

const SAFE = {
  ALLOWED_TAGS: "p br hr h3 h4 h5 h6 ul ol li blockquote strong em del code pre a table thead tbody tr th td".split(" "),
  ALLOWED_ATTR: ["href", "class", "start", "align"],
  ADD_URI_SAFE_ATTR: ["start", "align"], // no addresses
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const LONG_LINE = 2000; // the time to look for open emphasis grows with the square of some lines
const words = (text) => ({ type: "text", raw: text, text });
const alternative = ({ text }) => words(text || "image");

const markdown = new marked.Marked({
  breaks: true,
  tokenizer: {
    html: () => undefined, // no token: it is read as text
    tag(source) {
      const raw = /^<br ?\/?>/i.exec(source)?.[0]; // the only line break within a cell of a table
      return raw && { type: "br", raw };
    },
  },
  renderer: {
    heading({ tokens, depth }) {
      const level = Math.min(depth + 2, 6); // below those of the page
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>\n`;
    },
    link(token) {
      token.tokens = token.tokens.map((inner) => (inner.type === "image" ? alternative(inner) : inner));
      return false; // the rest is marked's
    },
    image(token) {
      return this.link({ href: token.href, tokens: [alternative(token)] });
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

// Shows a text that grows in `place`. Only its last two blocks can still change: those before are drawn once.
class Markdown {
  constructor(place) {
    this.place = place;
    this.links = Object.create(null); // that definitions in the text give
    this.read = 0; // characters of the blocks that are drawn for good
    this.nodes = 0; // and their nodes
  }

  // `whole`: the text has ended; a definition of a link at its end serves all of it.
  draw(text, whole = false) {
    try {
      const lexer = new marked.Lexer(markdown.defaults);
      lexer.tokens.links = this.links;
      const rest = text.replace(/\r\n?/g, "\n").slice(this.read); // as marked reads it
      const tokens = lexer.lex(whole ? rest : closed(rest));
      const blocks = tokens.filter((token) => token.type !== "space");
      const last = Math.max(0, tokens.indexOf(blocks.at(-2)));
      while (this.place.childNodes.length > this.nodes) this.place.lastChild.remove();
      this.place.append(elements(tokens.slice(0, last)));
      for (const token of tokens.slice(0, last)) this.read += token.raw.length;
      this.nodes = this.place.childNodes.length;
      this.place.append(elements(tokens.slice(last)));
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      this.read = this.nodes = 0; // thousands of nested blocks
      this.place.replaceChildren(element("p", "plain", text));
    }
  }
}

// Without the beginnings of markup at the end of a text that grows; with emphasis, code and links closed.
function closed(text) {
  const start = text.lastIndexOf("\n") + 1;
  if (text.length - start > LONG_LINE) return text;
  const before = text.slice(0, start);
  let line = text.slice(start).trimEnd();
  if (/^[ \t>]*(?:[-=+*_#`~|: \t]*|\d+[.)]?)$/.test(line)) return before; // of a list, a heading, a fence, a table
  if ((before.match(/^[ \t>]*(?:```|~~~)/gm) || []).length % 2) return text; // within a block of code
  line = line.replace(/[*_`~]+$/, "").replace(/!?\[([^\][]*)\]\([^()]*$/, "$1").trimEnd();
  const plain = line.replace(/(`+)[^`]+\1/g, "").replace(/(^|\s)[*~]+(?=\s)/g, "");
  const [tick] = /`+/.exec(plain) || [];
  if (tick) return before + line + tick;
  let end = "";
  let rest = plain;
  for (const mark of ["**", "*", "~~"]) {
    const parts = rest.split(mark);
    if (parts.length % 2 === 0) end = mark + end;
    rest = parts.join("");
  }
  return before + line + end;
}

function elements(tokens) {
  const made = DOMPurify.sanitize(markdown.parser(tokens), SAFE);
  for (const link of made.querySelectorAll("a[href]")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
    link.title = link.href;
  }
  for (const code of made.querySelectorAll("pre > code")) {
    const language = code.className.replace("language-", "");
    const block = element("div", "code");
    const head = element("div", "head faint", language);
    head.append(copier(code));
    const shown = scroller("pre", `${language} code`.trim());
    code.parentElement.replaceWith(block);
    shown.append(code);
    block.append(head, shown);
  }
  for (const table of made.querySelectorAll("table")) {
    const shown = scroller("div", "table");
    table.replaceWith(shown);
    shown.append(table);
  }
  return made;
}

// What is wider than the page is scrolled in itself, also by keys.
function scroller(tag, label) {
  const made = element(tag, "wide");
  made.tabIndex = 0;
  made.setAttribute("role", "group");
  made.setAttribute("aria-label", label);
  return made;
}

function copier(code) {
  const button = element("button", "", "Copy");
  button.type = "button";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent.trimEnd()); // a command that is pasted does not run at once
    } catch {
      getSelection().selectAllChildren(code); // a page of another host without TLS has no clipboard
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  return button;
}
