// The page: its controls, and its sections in the order in which they are shown.

let data = JSON.parse(document.getElementById("data").textContent);

function radio(name, value, label, checked, change) {
  const input = make("input", { type: "radio", name, value, checked });
  input.addEventListener("change", change);
  return make("label", {}, input, label);
}

function showControls() {
  const axes = Object.entries(AXES).map(([axis, title]) =>
    radio("axis", axis, title, axis === shown.axis, () => { shown.axis = axis; redraw(); }));
  const smoothing = make("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: shown.smoothing, id: "smoothing" });
  smoothing.addEventListener("input", () => { shown.smoothing = Number(smoothing.value); redraw(); });
  const filter = make("input", { type: "search", placeholder: "part of a name", value: shown.filter, id: "filter" });
  filter.addEventListener("input", () => { shown.filter = filter.value; showCurves(); });
  const runs = data.runs.map((run, index) => {
    const box = make("input", { type: "checkbox", checked: !shown.hidden.has(run.name) });
    box.addEventListener("change", () => { shown.hidden[box.checked ? "delete" : "add"](run.name); redraw(); });
    return make("label", {}, box, make("span", { class: "swatch", style: `background:${colour(index)}` }), readable(run.name));
  });
  document.getElementById("controls").replaceChildren(
    make("fieldset", {}, make("legend", {}, "over"), axes),
    make("label", {}, "smoothing", smoothing), make("label", {}, "metrics", filter),
    make("fieldset", {}, make("legend", {}, "runs"), runs));
}

function showOverview() {
  const main = Object.keys(data.units).filter((name) => data.units[name].main);
  contentOf("overview").replaceChildren(make("div", { id: "facts" }), make("h3", {}, "Main curves"), make("div", { class: "grid" }, main.map(curveOf)));
  showFacts();
}

function showFacts() {
  document.getElementById("written").textContent = data.written;
  document.getElementById("rules").replaceChildren(...data.rules.map((rule) => make("li", {}, readable(rule))));
  const rows = data.runs.map((run) => {
    const at = run.curves.axes.reduce((most, axis) => Math.max(most, axis.hours.at(-1) ?? 0), 0);
    const tokens = run.curves.axes.reduce((most, axis) => Math.max(most, axis.tokens.at(-1) ?? 0), 0);
    const steps = run.state.max_steps ? `${number(run.curves.last_step)} of ${number(run.state.max_steps)}` : number(run.curves.last_step);
    return [readable(run.name), readable(run.state.sentence), steps, at, tokens, run.curves.drawn.reward?.mean.at(-1)];
  });
  const faults = data.runs.flatMap((run) => run.damage.map((fault) => make("p", { class: "bad" }, readable(`${run.name}: ${fault}`))));
  const head = ["run", "state", "steps", "hours", "trained tokens", "last reward"];
  fill(document.getElementById("facts"), table(head, rows, [3, 4, 5]), ...faults);
}

function showEvaluation() {
  const names = Object.keys(data.units).filter((name) => data.units[name].group === "evaluation" && name !== "eval/step");
  contentOf("evaluation").replaceChildren(...orNote([
    names.length ? make("div", { class: "grid" }, names.map(curveOf)) : null, linkToSamples(),
  ], "No run was evaluated."));
}

function linkToSamples() {
  const run = data.runs.findIndex((each) => each.samples.shown.some((sample) => sample.evaluated !== null));
  if (run < 0) return null;
  const sample = data.runs[run].samples.shown.findLast((each) => each.evaluated !== null);
  const button = make("button", { type: "button" }, "Show the samples of the last evaluation");
  button.addEventListener("click", () => {
    choose({ run, kind: kindOf(sample), step: stepOf(sample), index: 0, follows: true });
    document.getElementById("samples").scrollIntoView();
    document.querySelector('[data-keeps="list"]').focus({ preventScroll: true });
  });
  return make("p", {}, button);
}

// A section of the page is an entry here and one in SECTIONS of page.py.
const SECTIONS = {
  overview: showOverview, findings: showFindings, evaluation: showEvaluation, samples: showSamples, ledger: showLedger, waits: showWaits,
  settings: showSettings, curves: showCurves,
};

function show() {
  showControls();
  for (const section of Object.values(SECTIONS)) section();
}

// A page that follows runs keeps its place: charts are drawn again where they are, and the chosen sample stays. Long
// files are read seldom: reading takes a tenth of the time at most.
const EVERY_MS = 2000, SHARE = 10;

function shape() {
  return JSON.stringify([Object.keys(data.units), data.runs.map((run) => [run.name, run.state.stages, run.state.balance === null, run.settings.length])]);
}

function update(newer) {
  const before = shape(), samples = data.runs.map((run) => run.samples.found).join();
  data.written = newer.written; data.units = newer.units; data.rules = newer.rules;
  newer.runs.forEach((run, index) => Object.assign(data.runs[index], run));
  if (shape() !== before) {
    const at = window.scrollY;
    show();
    window.scrollTo(0, at);
    return;
  }
  showFacts();
  showFindings();
  showNumbers();
  if (data.runs.map((run) => run.samples.found).join() !== samples) showSamples();
  redraw();
}

async function follow() {
  const says = document.getElementById("following");
  let tag = "", pause = EVERY_MS;
  for (;;) {
    await new Promise((resolve) => { setTimeout(resolve, pause); });
    const asked = performance.now();
    try {
      const answer = await fetch("data.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) { tag = answer.headers.get("ETag"); update(await answer.json()); }
      says.className = "";
      says.textContent = data.runs.some((run) => run.state.running) ? "follows the run" : "no run goes on";
    } catch {
      says.className = "lost";
      says.textContent = "the server of this page is gone";
    }
    pause = Math.max(EVERY_MS, SHARE * (performance.now() - asked));
  }
}

document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
show();
if ("follows" in document.body.dataset) follow();
