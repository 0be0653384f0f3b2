// What `penstock diagnose` finds: the numbers, the usual causes, and the values to try.

function showFindings() {
  contentOf("findings").replaceChildren(...data.runs.flatMap((run) => [
    data.runs.length > 1 ? make("h3", {}, readable(run.name)) : null,
    ...run.findings.map(findingOf),
    make("p", { class: "note" }, readable(`${run.findings.length || "no"} finding${run.findings.length === 1 ? "" : "s"}, by ` +
      `${run.looked_at.length} rules: ${run.looked_at.join(", ") || "the run has no metrics yet"}`)),
  ].filter((part) => part !== null)));
}

function findingOf(finding) {
  return make("article", { class: "finding" },
    make("h4", {}, make("code", {}, readable(finding.rule)), readable(`: ${finding.means}`)),
    make("p", {}, readable(finding.numbers)),
    make("ul", {}, finding.causes.map((cause) => make("li", {}, readable(cause)))),
    make("p", {}, "try ", finding.change.map((value, place) => [place ? ", " : "", make("code", {}, readable(value))])));
}
