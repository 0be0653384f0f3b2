// Samples by step: a list of those of one step, and the one that is chosen, with its rollout as a tree.

const chosen = { run: 0, kind: "", step: null, index: 0, mode: "advantage" };

function kindOf(sample) {
  return sample.evaluated === null ? "trained" : `evaluation of ${sample.set || "the prompts kept apart"}`;
}

function stepOf(sample) {
  return sample.evaluated === null ? sample.step : sample.evaluated;
}

function options(label, values, current, change, text = (value) => value) {
  const select = make("select", {}, values.map((value) => make("option", { value: String(value), selected: value === current }, text(value))));
  select.addEventListener("change", () => change(values[select.selectedIndex]));
  return make("label", {}, label, select);
}

function choose(change) {
  const focused = document.activeElement?.dataset?.keeps;
  Object.assign(chosen, { follows: false }, change);
  showSamples();
  if (focused) document.querySelector(`[data-keeps="${focused}"]`)?.focus();
}

function choices() {
  const withSamples = data.runs.map((run, index) => index).filter((index) => data.runs[index].samples.shown.length);
  if (!withSamples.length) return null;
  if (!withSamples.includes(chosen.run)) chosen.run = withSamples[0];
  const all = data.runs[chosen.run].samples.shown, kinds = [...new Set(all.map(kindOf))];
  if (!kinds.includes(chosen.kind)) chosen.kind = kinds[0];
  const some = all.filter((sample) => kindOf(sample) === chosen.kind);
  const steps = [...new Set(some.map(stepOf))].sort((one, other) => one - other);
  const latest = steps.at(-1);
  if (chosen.step === null) chosen.follows = true;
  if (chosen.follows) chosen.step = latest;
  if (!steps.includes(chosen.step)) chosen.step = steps.reduce((near, step) => (Math.abs(step - chosen.step) < Math.abs(near - chosen.step) ? step : near), latest);
  const list = some.filter((sample) => stepOf(sample) === chosen.step);
  chosen.index = Math.min(chosen.index, list.length - 1);
  return { withSamples, kinds, steps, list };
}

function toStep(steps, by) {
  const at = Math.min(steps.length - 1, Math.max(0, steps.indexOf(chosen.step) + by));
  choose({ step: steps[at], follows: at === steps.length - 1 });
}

function showSamples() {
  const scrolled = contentOf("samples").querySelector(".list")?.scrollTop ?? 0;
  drawSamples();
  const list = contentOf("samples").querySelector(".list");
  if (list !== null) list.scrollTop = scrolled;
}

function drawSamples() {
  const found = choices();
  if (found === null) {
    contentOf("samples").replaceChildren(make("p", { class: "note" }, "No run has samples: SinkTrainer(samples=Samples()) has a run write them."));
    return;
  }
  const { withSamples, kinds, steps, list } = found, at = steps.indexOf(chosen.step);
  const button = (label, by, name) => {
    const it = make("button", { type: "button", "aria-label": name, "data-keeps": name, disabled: at + by < 0 || at + by >= steps.length }, label);
    it.addEventListener("click", () => toStep(steps, by));
    return it;
  };
  const modes = Object.entries(COLOURS).map(([mode, title]) => radio("mode", mode, title, mode === chosen.mode, () => choose({ mode })));
  const controls = make("form", { "aria-label": "Which samples" },
    withSamples.length > 1 ? options("run", withSamples, chosen.run, (run) => choose({ run, index: 0 }), (run) => readable(data.runs[run].name)) : null,
    options("of", kinds, chosen.kind, (kind) => choose({ kind, index: 0 }), readable),
    make("fieldset", {}, button("‹", -1, "earlier step"),
      options("step", steps, chosen.step, (step) => choose({ step, follows: step === steps.at(-1) }), number), button("›", 1, "later step"),
      make("span", { class: "quiet" }, `${at + 1} of ${number(steps.length)}`)),
    make("fieldset", {}, make("legend", {}, "tokens by"), modes));
  controls.addEventListener("submit", (event) => event.preventDefault());
  contentOf("samples").replaceChildren(controls, make("div", { class: "samples" }, listOf(list, steps), detailOf(list[chosen.index])));
}

function listOf(list, steps) {
  const rows = list.map((sample, index) => {
    const row = make("div", { class: "row", role: "option", id: `sample-${index}`, "aria-selected": String(index === chosen.index) },
      make("span", { class: sample.kind === "best" ? "good" : "bad" }, `${sample.kind} ${sample.rank}`),
      make("span", {}, `reward ${number(sample.reward)}`), make("span", { class: "quiet" }, `${number(sample.completion_tokens)} tokens`));
    row.addEventListener("click", () => choose({ index }));
    return row;
  });
  const box = make("div", { class: "list", role: "listbox", tabindex: 0, "data-keeps": "list", "aria-label": `samples of step ${chosen.step}`,
    "aria-activedescendant": `sample-${chosen.index}` }, rows);
  const keys = { ArrowDown: () => choose({ index: Math.min(list.length - 1, chosen.index + 1) }), ArrowUp: () => choose({ index: Math.max(0, chosen.index - 1) }),
    ArrowLeft: () => toStep(steps, -1), ArrowRight: () => toStep(steps, 1), Home: () => choose({ index: 0 }), End: () => choose({ index: list.length - 1 }) };
  box.addEventListener("keydown", (event) => {
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
  return box;
}

// Sequences of a rollout as a tree: each hangs below the earlier one whose text it shares most of.
function treeOf(sequences) {
  const texts = sequences.map((sequence) => sequence.prompt + sequence.completion);
  return sequences.map((sequence, index) => {
    let parent = null, most = 0;
    for (let earlier = 0; earlier < index; earlier += 1) {
      const same = shared(texts[earlier], texts[index]);
      if (same > most) { parent = earlier; most = same; }
    }
    return { sequence, parent, shared: most };
  });
}

function shared(one, other) {
  let at = 0;
  while (at < one.length && at < other.length && one[at] === other[at]) at += 1;
  return at;
}

function detailOf(sample) {
  const sequences = [...sample.branches, sample], tree = treeOf(sequences), turns = sequences.map(turnsOf);
  const scale = scaleOf(turns, chosen.mode);
  const drawn = tree.map(({ parent, shared: same }, index) => make("div", { class: "sequence" },
    tree.length > 1 ? make("h3", { id: `sequence-${index}` }, nameOf(tree, index), same ? make("span", { class: "quiet" }, ` shares its first ${number(same)} characters with ${nameOf(tree, parent)}`) : null) : null,
    turns[index].map((turn, place) => drawnTurn(turn, chosen.mode, scale, `turn-${index}-${place}`))));
  return make("div", { class: "detail", "aria-live": "off" }, facts(sample), partsOf(sample),
    turns.flat().length > 2 ? make("nav", { class: "tree", "aria-label": "Turns of the rollout" }, branchesBelow(tree, turns, null)) : null,
    make("p", { class: "note" }, legendOf(chosen.mode, scale)), drawn,
    sample.answer === null ? null : make("div", { class: "turn answer" }, make("div", { class: "of" }, "right answer"), make("div", { class: "text" }, readable(sample.answer))));
}

function nameOf(tree, index) {
  return tree.length === 1 ? "sequence" : `sequence ${index + 1} of ${tree.length}`;
}

function branchesBelow(tree, turns, parent) {
  const below = tree.map((branch, index) => ({ ...branch, index })).filter((branch) => branch.parent === parent);
  if (!below.length) return null;
  return make("ul", {}, below.map(({ index }) => make("li", {}, make("span", { class: "quiet" }, nameOf(tree, index)),
    make("ol", {}, turns[index].map((turn, place) => {
      const start = turn.text.trim().replace(/\s+/g, " ");
      const jump = make("button", { type: "button", class: `jump ${turn.kind}` }, make("b", {}, titleOf(turn)), ` ${readable(start.length > 70 ? `${start.slice(0, 69)}…` : start)}`);
      jump.addEventListener("click", () => document.getElementById(`turn-${index}-${place}`).scrollIntoView({ block: "center" }));
      return make("li", {}, jump);
    })), branchesBelow(tree, turns, index))));
}

function facts(sample) {
  const known = [["reward", number(sample.reward)], ["advantage", number(sample.advantage)], ["tokens", number(sample.completion_tokens)],
    ["ended by", sample.stop_reason], ["weights of step", number(sample.policy_version)], ["prompt", `${sample.env}/${sample.instance_id}`],
    ["completion", number(sample.repetition)]];
  return make("dl", { class: "facts" }, known.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, readable(value)))));
}

function partsOf(sample) {
  const parts = Object.entries(sample.parts);
  if (!parts.length) return null;
  const most = Math.max(...parts.map(([, value]) => Math.abs(value ?? 0)), 1e-9);
  return make("div", { class: "parts", role: "group", "aria-label": "parts of the reward" }, parts.map(([name, value]) => make("div", {},
    make("span", {}, readable(name)), make("span", { class: "bar" }, make("i", { class: value < 0 ? "below" : "", style: `width:${(100 * Math.abs(value ?? 0) / most).toFixed(1)}%` })),
    make("span", { class: "value" }, number(value)))));
}
