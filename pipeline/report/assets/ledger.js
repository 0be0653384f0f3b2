// The ledger: where trajectories went, in all and over time.

const STATES = ["trained", "filtered", "stale", "rejected", "failed", "lost", "unfinished"];
const STATE_COLOURS = { trained: 2, filtered: 6, stale: 1, rejected: 3, failed: 4, lost: 0, unfinished: 7, "in flight": 5 };

// plotly reads tags in labels: text of runs has none for it.
function plain(text, longest = 60) {
  const short = text.length > longest ? `${text.slice(0, longest - 1)}…` : text;
  return readable(short).replaceAll("<", "‹").replaceAll(">", "›").replaceAll("&", "＆").replaceAll("$", "＄");
}

function endsOf(run) {
  const balance = run.state.balance;
  if (balance === null) return [];
  const ends = STATES.filter((state) => balance.ended[state])
    .map((state) => ({ state, count: balance.ended[state], reasons: Object.entries(balance.reasons[state] ?? {}) }));
  if (balance.in_flight) ends.push({ state: "in flight", count: balance.in_flight, reasons: [] });
  return ends;
}

function flowOf(run) {
  const labels = [], colours = [], links = { source: [], target: [], value: [], color: [] };
  const node = (label, of) => { labels.push(label); colours.push(colour(of)); return labels.length - 1; };
  const link = (source, target, value, of) => {
    links.source.push(source); links.target.push(target); links.value.push(value); links.color.push(faded(colour(of), 0.28));
  };
  const begun = node(`begun ${number(run.state.balance.admitted)}`, 7);
  for (const { state, count, reasons } of endsOf(run)) {
    const of = STATE_COLOURS[state], place = node(`${state} ${number(count)}`, of);
    link(begun, place, count, of);
    for (const [reason, many] of reasons.filter(([name]) => name))
      link(place, node(`${plain(reason)} ${number(many)}`, of), many, of);
  }
  return {
    traces: [{
      type: "sankey", arrangement: "snap", valueformat: ",d",
      node: { label: labels, color: colours, pad: 14, thickness: 14, line: { width: 0 }, hovertemplate: "%{label}<extra></extra>" },
      link: { ...links, hovertemplate: "%{source.label} → %{target.label}<extra></extra>" },
    }],
    layout: { ...layoutOf("", ""), margin: { l: 8, r: 8, t: 10, b: 10 } },
    summary: labels.join(", "),
  };
}

function endsOverTime(run) {
  const names = ["in_flight", "begun", ...STATES].filter((state) => run.curves.drawn[`ledger/${state}`]?.total);
  const traces = names.map((state) => {
    const curve = run.curves.drawn[`ledger/${state}`], of = colour(STATE_COLOURS[state] ?? (state === "begun" ? 0 : 5));
    const ends = STATES.includes(state), axis = run.curves.axes[curve.axis];
    const once = (values) => values.filter((value, at) => axis.step[at] !== axis.step[at - 1]); // not the line of an evaluation
    return {
      x: once(axis[shown.axis]), y: once(ends ? curve.mean : smoothed(curve.mean, shown.smoothing)), name: state.replace("_", " "), type: "scatter", mode: "lines",
      line: { color: of, width: ends ? 0.6 : 1.4, dash: ends ? "solid" : state === "begun" ? "dot" : "dash" },
      ...(ends ? { stackgroup: "ends", fillcolor: faded(of, 0.5) } : {}), hovertemplate: "%{y:.5~g}",
    };
  });
  return {
    traces, layout: layoutOf(AXES[shown.axis], "trajectories in a step", { showlegend: true }),
    summary: `trajectories that begin and end in each step of ${run.name}`,
  };
}

const REASON = /^ended\/([a-z]+)\/([^]+)$/;

function reasonsOf(run) {
  return Object.entries(run.curves.drawn).flatMap(([name, curve]) => {
    const found = REASON.exec(name);
    return found === null || !STATES.includes(found[1]) ? [] : [{ state: found[1], reason: found[2], curve }];
  }).sort((one, other) => STATES.indexOf(one.state) - STATES.indexOf(other.state) || other.curve.total - one.curve.total);
}

function reasonsOverTime(run) {
  const of = reasonsOf(run), before = (at) => of.slice(0, at).filter(({ state }) => state === of[at].state).length;
  return {
    traces: of.map(({ state, reason, curve }, at) => ({
      x: run.curves.axes[curve.axis][shown.axis], y: smoothed(curve.mean, shown.smoothing), name: `${state}: ${plain(reason)}`,
      type: "scatter", mode: "lines", stackgroup: "reasons", hovertemplate: "%{y:.5~g}", line: { color: colour(STATE_COLOURS[state]), width: 0.8 },
      fillcolor: faded(colour(STATE_COLOURS[state]), Math.max(0.12, 0.6 - 0.16 * before(at))),
    })),
    layout: layoutOf(AXES[shown.axis], "trajectories in a step", { showlegend: true }),
    summary: of.map(({ state, reason, curve }) => `${state}: ${readable(reason)}, ${number(curve.total)}`).join("; "),
  };
}

function tableOfEnds(run) {
  const total = (name) => run.curves.drawn[name]?.total;
  const rows = endsOf(run).flatMap(({ state, count, reasons }) => [
    [state, "", count, total(`ledger/${state.replace(" ", "_")}`)],
    ...reasons.filter(([reason]) => reason).sort((one, other) => other[1] - one[1]).map(([reason, many]) => [state, readable(reason), many, total(run.state.metrics[state]?.[reason])]),
  ]);
  return table(["state", "reason", "since the last start", "in all steps"], [["begun", "", run.state.balance.admitted, total("ledger/begun")], ...rows], [2, 3]);
}

function showLedger() {
  const parts = data.runs.flatMap((run) => {
    if (run.state.balance === null && !run.curves.drawn["ledger/begun"]) return [];
    const flow = run.state.balance === null || !run.state.balance.admitted ? [] : [
      chart(`${run.name}: from the beginning to the end`, "trajectories since the last start of the run, by the state and the reason of their end",
        () => flowOf(run), "tall")];
    const time = run.curves.drawn["ledger/begun"] ? [
      chart(`${run.name}: over time`, "mean number of trajectories that begin and end in a step; ends are stacked, the other two lines are smoothed", () => endsOverTime(run), "tall")] : [];
    const reasons = reasonsOf(run).length ? [
      chart(`${run.name}: reasons over time`, "mean number of trajectories that end in a step for each reason; smoothed, and stacked", () => reasonsOverTime(run), "tall")] : [];
    return [make("div", { class: "wide" }, flow, time, reasons), run.state.balance === null ? null : make("details", {},
      make("summary", {}, `${readable(run.name)}: the numbers`), make("div", { "data-numbers": run.name }))];
  });
  fill(contentOf("ledger"), ...orNote(parts, "No run has a view.json or metrics of its ledger."));
  showNumbers();
}

function showNumbers() {
  for (const place of contentOf("ledger").querySelectorAll("[data-numbers]"))
    fill(place, tableOfEnds(data.runs.find((run) => run.name === place.dataset.numbers)));
}

function orNote(parts, note) {
  const some = parts.filter((part) => part !== null);
  return some.length ? some : [make("p", { class: "note" }, note)];
}
