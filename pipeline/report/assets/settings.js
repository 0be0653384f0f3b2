// The configuration: a column for each part of each run, those keys first whose values differ.

function showSettings() {
  const parts = data.runs.flatMap((run) => run.settings.map((part) => ({
    ...part, title: run.settings.length > 1 ? `${readable(run.name)}, from step ${number(part.begins)}` : readable(run.name),
  })));
  const keys = [...new Set(parts.flatMap((part) => Object.keys(part.values)))];
  const differs = (key) => new Set(parts.map((part) => part.values[key])).size > 1;
  const head = ["key", ...parts.map((part) => part.title)];
  const rows = (some) => some.map((key) => [make("code", {}, readable(key)), ...parts.map((part) => valueOf(part.values[key]))]);
  const faults = parts.filter((part) => part.fault).map((part) => make("p", { class: "bad" }, readable(`${part.title}: ${part.fault}`)));
  const different = keys.filter(differs);
  fill(contentOf("settings"), ...orNote([
    ...faults,
    parts.length > 1 ? make("h3", {}, different.length ? `What differs: ${different.length} of ${keys.length} keys` : "Nothing differs") : null,
    different.length ? table(head, rows(different)) : null,
    keys.length ? make("details", {}, make("summary", {}, `All ${keys.length} keys`), table(head, rows(keys))) : null,
  ], "No run has a config.json."));
}

function valueOf(value) {
  return value === undefined ? make("span", { class: "quiet" }, "absent") : make("code", {}, readable(value));
}
