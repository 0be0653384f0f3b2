// The waits of each stage over time, the lag, and the versions of the weights that were trained.

const WAIT = /^timing_s\/(.+)\/wait_(input|output)$/;

function waitsOf(run) {
  const per = run.curves.drawn["perf/time_per_step"];
  if (per === undefined) return [];
  const stages = run.state.stages, place = (stage) => (stages.includes(stage) ? stages.indexOf(stage) : stages.length);
  return Object.entries(run.curves.drawn).flatMap(([name, curve]) => {
    const found = WAIT.exec(name);
    if (found === null || curve.axis !== per.axis) return [];
    const share = columns(curve.mean.map((wait, at) => (per.mean[at] > 0 ? wait / per.mean[at] : null)));
    return [{ stage: found[1], label: `${found[1]}, ${found[2] === "input" ? "for records" : "for credit"}`, share, axis: curve.axis, output: found[2] === "output" }];
  }).sort((one, other) => place(other.stage) - place(one.stage) || other.output - one.output)
    .filter((row) => !row.output || row.share.some((share) => share > 0.001));
}

// Means of successive values, so that a column can be seen.
const COLUMNS = 150;

function columns(values) {
  const each = Math.ceil(values.length / COLUMNS), found = [];
  for (let at = 0; at < values.length; at += each) found.push(mean(values.slice(at, at + each)));
  return found;
}

function pictureOfWaits(run) {
  const rows = waitsOf(run);

  return {
    traces: [{
      type: "heatmap", z: rows.map((row) => row.share), y: rows.map((row) => plain(row.label)),
      x: columns(run.curves.axes[rows[0].axis][shown.axis]), zmin: 0, zmax: 1,
      colorscale: [[0, styled("soft")], [1, colour(0)]],
      colorbar: { title: { text: "share of<br>the step", font: { size: 10 } }, thickness: 9, len: 0.9, tickfont: { size: 10 }, outlinewidth: 0 },
      hovertemplate: "%{y}<br>%{x:.4~g}: %{z:.0%}<extra></extra>",
    }],
    layout: layoutOf(AXES[shown.axis], "", { hovermode: "closest", margin: { l: 150, r: 8, t: 6, b: 36 }, yaxis: { tickfont: { size: 10.5 }, automargin: true, showgrid: false } }),
    summary: rows.map((row) => `${row.label} waits ${Math.round(100 * mean(row.share))} % of the time`).join(", "),
  };
}

function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + (value ?? 0), 0) / values.length : 0;
}

function pictureOfVersions(run) {
  const newest = run.curves.drawn["staleness/mean"], oldest = run.curves.drawn["staleness/max"];
  const axis = run.curves.axes[newest.axis];
  const line = (name, y, more) => ({ x: axis[shown.axis], y, name, type: "scatter", mode: "lines", hovertemplate: "%{y:.6~g}", ...more });
  return {
    traces: [
      line("oldest in the batch", axis.step.map((step, at) => step - 1 - oldest.mean[at]), { line: { color: colour(1), width: 1.2 } }),
      line("mean of the batch", axis.step.map((step, at) => step - 1 - newest.mean[at]), { line: { color: colour(0), width: 1.6 } }),
      line("newest before the step", axis.step.map((step) => step - 1), { line: { color: colour(7), width: 1, dash: "dot" } }),
    ],
    layout: layoutOf(AXES[shown.axis], "version of the weights", { showlegend: true }),
    summary: `versions of the weights that sampled the batches of ${run.name}`,
  };
}

function showWaits() {
  const lag = ["staleness/mean", "staleness/max"].filter((name) => name in data.units);
  const parts = data.runs.flatMap((run) => {
    const rows = waitsOf(run), versions = run.curves.drawn["staleness/mean"], oldest = run.curves.drawn["staleness/max"];
    return [
      rows.length ? chart(`${run.name}: waits of each stage`, `seconds that a stage waits over those of the step, in at most ${COLUMNS} means; the workers of a stage are added up`,
        () => pictureOfWaits(run), "tall") : null,
      versions && oldest && versions.axis === oldest.axis ? chart(`${run.name}: versions of the weights`,
        "optimizer step of the weights that sampled the batch of each step", () => pictureOfVersions(run), "tall") : null,
    ].filter(Boolean);
  });
  contentOf("waits").replaceChildren(...orNote([
    parts.length ? make("div", { class: "wide" }, parts) : null, lag.length ? make("div", { class: "grid" }, lag.map(curveOf)) : null,
  ], "No run has metrics of waits or of the lag."));
}
