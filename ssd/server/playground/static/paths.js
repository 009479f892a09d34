// Draws the rounds of an answer: what was drafted, accepted and rejected, and the branches that were prepared.
"use strict";

const MOST_ROUNDS = 300; // older ones are removed
const SOURCES = { none: "", draft: "drafted", hit: "hit", jit: "miss", sibling: "miss", suffix: "looked up" };

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function visible(text) {
  return text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

// A function that has `draw` called in the next frame; after a draw that took long, in a later one.
function paced(draw) {
  let waiting = false;
  let cost = 0; // of the last draw, in ms
  const now = () => {
    waiting = false;
    const begin = performance.now();
    draw();
    cost = performance.now() - begin;
  };
  return () => {
    if (!waiting) setTimeout(() => requestAnimationFrame(now), 3 * cost);
    waiting = true;
  };
}

class Paths {
  constructor(list) {
    this.list = list;
    this.drawSoon = paced(() => this.draw());
    this.clear();
  }

  clear() {
    this.list.replaceChildren();
    this.count = 0;
    this.added = [];
  }

  show(rounds) {
    this.clear();
    this.added = [...rounds];
    this.draw();
  }

  add(round) {
    this.added.push(round);
    this.drawSoon();
  }

  // Draws the rounds that have been added: not one at a time, because each draw takes a layout of the page.
  draw() {
    const atEnd = this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < 40;
    const shown = this.added.slice(-MOST_ROUNDS);
    this.count += this.added.length - shown.length;
    this.added = [];
    this.list.append(...shown.map((round) => this.item(round)));
    while (this.list.childElementCount > MOST_ROUNDS) this.list.firstElementChild.remove();
    if (atEnd) this.list.scrollTop = this.list.scrollHeight;
  }

  item(round) {
    this.count += 1;
    const source = SOURCES[round.origin];
    const item = element("li", round.looked_up ? source : "");
    const verdict = element("span", "verdict", `${this.count} `);
    verdict.append(element("b", "", source));
    item.append(verdict);
    round.tokens.forEach((text, place) => {
      const drafted = place < round.accepted;
      item.append(pill(text, drafted ? round.by : "target", drafted ? "accepted" : "by the target"));
    });
    for (const text of round.rejected) item.append(pill(text, "rejected", "rejected"));
    if (round.branches.length) item.append(branches(round));
    return item;
  }
}

function pill(text, kind, spoken) {
  const made = element("span", `pill ${kind}`, visible(text) || "∅");
  made.title = `${JSON.stringify(text)}, ${spoken}`;
  made.append(element("span", "hidden", ` ${spoken}, `));
  return made;
}

function branches(round) {
  const list = element("ul", "branches");
  const shown = round.branches.slice(0, 5);
  const used = round.branches.find((branch) => branch.came_true);
  if (used && !shown.includes(used)) shown.push(used);
  shown.sort((a, b) => a.after - b.after);
  for (const branch of shown) {
    const text = `${branch.after}: ${visible(branch.token)} ${visible(branch.draft)}`;
    const item = element("li", branch.came_true ? "true" : "", text);
    item.title = `prepared for ${branch.after} accepted tokens, then ${JSON.stringify(branch.token)}`;
    if (branch.came_true) item.append(element("span", "hidden", ", came true"));
    list.append(item);
  }
  const more = round.num_branches - shown.length;
  if (more > 0) list.append(element("li", "", `+${more}`));
  return list;
}
