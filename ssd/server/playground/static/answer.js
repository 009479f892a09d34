// An answer on the page: its text, or its tokens in the colours of those who wrote them.
"use strict";

class Answer {
  static view = "text"; // or "tokens"

  constructor(rounds, text) {
    this.element = element("div");
    this.rounds = rounds;
    this.text = text;
    this.ended = true;
    this.growSoon = paced(() => this.ended || this.grow());
    this.draw();
  }

  add(round) {
    this.ended = false;
    this.rounds.push(round);
    this.text += round.tokens.join("");
    this.growSoon();
  }

  end() {
    this.ended = true;
    this.draw();
  }

  // Draws all of it.
  draw() {
    this.element.replaceChildren();
    this.element.className = `answer ${Answer.view}`;
    this.drawn = 0;
    this.markdown = new Markdown(this.element);
    this.update();
  }

  // Draws what has been added, and keeps its end in view.
  grow() {
    const log = this.element.closest("#log");
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    this.update();
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  update() {
    if (Answer.view === "text") {
      this.markdown.draw(this.text, this.ended);
      return;
    }
    if (!this.rounds.length) this.element.textContent = this.text; // who wrote it is no longer known
    for (const round of this.rounds.slice(this.drawn)) colour(this.element, round);
    this.drawn = this.rounds.length;
  }
}

function colour(shown, round) {
  round.tokens.forEach((text, place) => {
    if (text) shown.append(element("span", place < round.accepted ? round.by : "", text));
  });
}
