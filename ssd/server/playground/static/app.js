// The chat, and the charts of the last minute.
"use strict";

const $ = (id) => document.getElementById(id);
const MINUTE = 60; // samples that a chart shows
const paths = new Paths($("paths"));
const model = new URLSearchParams(location.search).get("model"); // of a server of several; null: its first one
const query = model === null ? "" : `?model=${encodeURIComponent(model)}`;
let server = null; // the last answer of /playground/state
let conversation = []; // {role, content, runs?, shown?}; runs: one per mode in which an answer was written
let samples = []; // one a second: [tokens/s, acceptance, hit rate]
let running = null; // AbortController of the answer that is being written
const answers = []; // what is shown of the conversation's answers, by place

// --- requests ----------------------------------------------------------------------------------------------------

function headers(more) {
  const key = $("key").value;
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// Writes one answer into `shown`, an Answer; returns its run: {mode, text, rounds, …}.
async function write(messages, settings, shown, signal) {
  const run = { mode: settings.speculate ? server.mode : "ar", seed: settings.seed, tokens: 0 };
  const response = await fetch(`/playground/chat${query}`, {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify({ messages, ...settings }),
    signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  paths.clear();
  let first = 0;
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    if (event.finish_reason) {
      Object.assign(run, event, { seed: settings.seed });
      continue;
    }
    const now = performance.now();
    for (const round of event.rounds) {
      paths.add(round);
      shown.add(round);
      run.tokens += round.tokens.length;
    }
    first = first || now;
    if (run.tokens > 1 && now > first) {
      $("status").textContent = `${run.tokens} tokens, ${((run.tokens * 1000) / (now - first)).toFixed(0)} a second`;
    }
  }
  return { ...run, text: shown.text, rounds: shown.rounds };
}

// --- the conversation --------------------------------------------------------------------------------------------

function settings() {
  const seed = $("seed").value;
  return {
    temperature: Number($("temperature").value),
    seed: seed === "" ? Math.floor(Math.random() * 2 ** 31) : Number(seed),
    max_tokens: Number($("tokens").value),
    speculate: $("mode").value !== "ar",
    branches: $("branches").checked && server.branches && $("mode").value !== "ar",
  };
}

function messagesBefore(place) {
  return conversation.slice(0, place).map(({ role, content }) => ({ role, content }));
}

async function send(text) {
  conversation.push({ role: "user", content: text });
  show(conversation.length - 1);
  conversation.push({ role: "assistant", content: "", runs: [], settings: settings() });
  await answer(conversation.length - 1, conversation.at(-1).settings);
}

// Writes the answer at `place`, or writes it again in another mode.
async function answer(place, wanted) {
  const message = conversation[place];
  delete message.error;
  const shown = new Answer([], "");
  let kept = shown;
  show(place, shown);
  busy(true);
  try {
    const run = await write(messagesBefore(place), wanted, shown, running.signal);
    message.runs = [...message.runs.filter((other) => other.mode !== run.mode), run];
    message.content = run.text;
    message.shown = run.mode;
    $("status").textContent = "";
  } catch (error) {
    if (message.runs.length) kept = null; // the answer that was there stays
    else message.content = shown.text;
    if (error.name === "AbortError") {
      $("status").textContent = "stopped";
    } else {
      $("status").textContent = "failed";
      message.error = error.message;
    }
  }
  shown.end();
  paths.draw();
  busy(false);
  save();
  show(place, kept);
}

function busy(is) {
  running = is ? new AbortController() : null;
  $("log").setAttribute("aria-busy", String(is)); // a screen reader reads the answer when it is complete
  $("send").disabled = is;
  $("stop").disabled = !is;
  $("new").disabled = is;
  for (const button of document.querySelectorAll(".speed button")) button.disabled = is;
}

// Shows a message. `answer`: what is on the page already; else an answer as it was written in the mode `shown`.
function show(place, answer = null) {
  $("hello").hidden = true;
  const message = conversation[place];
  const old = document.getElementById(`message-${place}`);
  const article = element("article", message.role);
  article.id = `message-${place}`;
  article.append(element("h2", "", message.role === "user" ? "You" : server.model));
  if (message.role === "user") {
    article.append(element("div", "", message.content));
  } else {
    answers[place] = answer || new Answer(shownRun(message)?.rounds || [], message.content);
    article.append(answers[place].element);
  }
  if (message.error) article.append(element("p", "error", message.error));
  if (message.runs) article.append(speeds(message, place));
  old ? old.replaceWith(article) : $("log").append(article);
  article.scrollIntoView({ block: "end" });
  return article;
}

function shownRun(message) {
  return message.runs?.find((run) => run.mode === message.shown);
}

function speed(run) {
  const rate = run.tokens_per_second ? `${run.tokens_per_second.toFixed(1)} tokens/s` : "-";
  const share = run.drafted ? `, ${Math.round((100 * run.accepted) / run.drafted)} % accepted` : "";
  const hits = run.look_ups ? `, ${Math.round((100 * run.hits) / run.look_ups)} % hits` : "";
  return `${run.mode.toUpperCase()}: ${rate}, ${run.output_tokens} tokens in ${run.rounds_total} rounds${share}${hits}`;
}

function speeds(message, place) {
  const list = element("ul", "speed faint");
  const best = Math.max(...message.runs.map((run) => run.tokens_per_second || 0));
  for (const run of message.runs) {
    const item = element("li");
    item.append(message.runs.length > 1 ? switchTo(run, message, place) : speed(run));
    const bar = element("span", "bar");
    bar.style.width = `${(100 * (run.tokens_per_second || 0)) / (best || 1)}%`;
    item.append(bar);
    list.append(item);
  }
  if (message.runs.length > 1) {
    const same = message.runs.every((run) => run.text === message.runs[0].text);
    list.append(element("li", "", same ? "The same text in both modes." : "The texts differ."));
  }
  if (message.runs.length && server.mode !== "ar") list.append(again(message, place));
  return list;
}

// A button that shows the answer, and its rounds, as it was written in the mode of `run`.
function switchTo(run, message, place) {
  const button = element("button", "", speed(run));
  button.type = "button";
  button.title = `Show the answer of ${run.mode.toUpperCase()}, and its rounds`;
  button.disabled = running !== null;
  button.setAttribute("aria-pressed", String(run.mode === message.shown));
  button.addEventListener("click", () => {
    message.shown = run.mode;
    message.content = run.text;
    save();
    show(place).querySelector("[aria-pressed=true]").focus();
    paths.show(run.rounds);
  });
  return button;
}

function again(message, place) {
  const last = message.runs.at(-1);
  const speculate = last.mode === "ar";
  const item = element("li");
  const button = element("button", "", `Again with ${(speculate ? server.mode : "ar").toUpperCase()}, same seed`);
  button.type = "button";
  button.disabled = running !== null;
  button.addEventListener("click", () => {
    const branches = speculate && server.branches && $("branches").checked;
    answer(place, { ...message.settings, seed: last.seed, speculate, branches });
  });
  item.append(button);
  return item;
}

// Without branches, of which there are many.
function save() {
  const kept = (key, value) => (key === "branches" && Array.isArray(value) ? [] : value);
  try {
    sessionStorage.setItem("conversation", JSON.stringify(conversation, kept));
  } catch {
    $("status").textContent = "The conversation is too long to survive a reload.";
  }
}

// --- the last minute ---------------------------------------------------------------------------------------------

async function poll() {
  try {
    const response = await fetch(`/playground/state${query}`, { headers: headers({}) });
    $("key-label").hidden = response.status !== 401 && !$("key").value;
    if (!response.ok) throw new Error((await response.json()).error.message);
    take(await response.json());
  } catch (error) {
    $("served").textContent = error.message;
  }
  setTimeout(poll, 1000);
}

function take(state) {
  const before = server;
  server = state;
  if (!before) begin();
  describe();
  if (!before || before.seconds >= state.seconds) return;
  const share = (part, whole) => (state[whole] > before[whole] ? (state[part] - before[part]) / (state[whole] - before[whole]) : null);
  const rate = (state.output_tokens - before.output_tokens) / (state.seconds - before.seconds);
  samples = [...samples.slice(1 - MINUTE), [rate, share("accepted", "drafted"), share("hits", "look_ups")]];
  sessionStorage.setItem("samples", JSON.stringify(samples));
  charts();
}

function charts() {
  const fastest = Math.max(1, ...samples.map(([rate]) => rate));
  const last = (place) => samples.map((sample) => sample[place]).findLast((value) => value !== null);
  const percent = (value) => (value === undefined ? "-" : `${Math.round(100 * value)} %`);
  chart("chart-rate", 0, fastest, `Tokens a second during the last minute, at most ${fastest.toFixed(0)}`);
  chart("chart-acceptance", 1, 1, "Accepted share of draft tokens during the last minute");
  chart("chart-hits", 2, 1, "Share of prepared drafts that were used during the last minute");
  $("rate").textContent = `${(last(0) || 0).toFixed(0)} now, ${fastest.toFixed(0)} at most`;
  $("acceptance").textContent = percent(last(1));
  $("hits").textContent = percent(last(2));
  $("load").textContent =
    `${server.running} running, ${server.waiting} waiting, ${Math.round(100 * server.kv_usage)} % of the KV cache`;
}

function chart(id, place, most, label) {
  const points = samples
    .map((sample, i) => [i + MINUTE - samples.length, sample[place]])
    .filter(([, value]) => value !== null)
    .map(([x, value]) => `${x},${39 - (37 * value) / most}`);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", points.join(" "));
  const svg = $(id);
  svg.setAttribute("viewBox", `0 0 ${MINUTE - 1} 40`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  svg.replaceChildren(line);
}

// --- beginning ---------------------------------------------------------------------------------------------------

// What is served; of a model that is loaded on demand, more is known once it is.
function describe() {
  const drafts = server.draft ? `, ${server.draft} drafts` : "";
  $("served").textContent = `${server.model}: ${server.mode.toUpperCase()}${drafts}${server.note ? `. ${server.note}` : ""}`;
  $("branches-label").hidden = !server.branches;
  $("no-branches").hidden = server.mode !== "ssd" || server.branches;
}

// On a narrow screen the controls are folded behind a button, which says how they are set.
function summarise() {
  const { temperature, speculate } = settings();
  const seed = $("seed").value && `, seed ${$("seed").value}`;
  const mode = (speculate ? server.mode : "ar").toUpperCase();
  $("set").textContent = `${mode}, temperature ${temperature}${seed}, ${$("tokens").value} tokens`;
}

function fold(is) {
  $("settings").setAttribute("aria-expanded", String(!is));
}

function begin() {
  $("mode").options[0].textContent = server.mode.toUpperCase();
  if (server.mode === "ar") $("mode").options[1].remove();
  for (const name of server.models || []) {
    $("model").append(new Option(name, name, false, name === server.model));
    $("model-label").hidden = false;
  }
  summarise();
  conversation = JSON.parse(sessionStorage.getItem("conversation") || "[]");
  samples = JSON.parse(sessionStorage.getItem("samples") || "[]");
  conversation.forEach((_, place) => show(place));
  paths.show(conversation.map(shownRun).findLast(Boolean)?.rounds || []);
  charts();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light theme" : "Dark theme"; // what a click does
}

function setView(view) {
  Answer.view = view;
  $("view").querySelector(`[value=${view}]`).checked = true;
  answers.forEach((answer) => answer.draw());
}

// Settings outlive the tab where the browser allows it.
function remembered(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

function remember(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // they hold until the page is left
  }
}

const dark = matchMedia("(prefers-color-scheme: dark)");
setTheme(remembered("theme") || (dark.matches ? "dark" : "light"));
dark.addEventListener("change", () => remembered("theme") || setTheme(dark.matches ? "dark" : "light"));
$("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  remember("theme", theme);
  setTheme(theme);
});
setView(remembered("view") === "tokens" ? "tokens" : "text");
$("view").addEventListener("change", (event) => {
  remember("view", event.target.value);
  setView(event.target.value);
});
const narrow = matchMedia("(max-width: 52rem)");
const foldAside = () => document.querySelectorAll("aside details").forEach((part) => (part.open = !narrow.matches));
foldAside();
narrow.addEventListener("change", foldAside);
$("settings").addEventListener("click", () => fold($("settings").ariaExpanded === "true"));
$("controls").addEventListener("input", () => server && summarise());
$("controls").addEventListener("invalid", () => fold(false), true); // the browser shows what is wrong with it
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || running || !server) return;
  $("prompt").value = "";
  send(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => event.key === "Escape" && running && running.abort());
$("stop").addEventListener("click", () => {
  running.abort();
  $("prompt").focus();
});
$("model").addEventListener("change", () => {
  location.search = `?model=${encodeURIComponent($("model").value)}`;
});
$("new").addEventListener("click", () => {
  conversation = [];
  save();
  paths.clear();
  for (const article of document.querySelectorAll("article")) article.remove();
  answers.length = 0;
  $("hello").hidden = false;
  $("prompt").focus();
});
poll();
