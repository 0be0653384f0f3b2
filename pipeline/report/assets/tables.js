// Tables by DataTables, which sorts and searches what `table` has made of text nodes.

const LONG = 10, PAGE = 100;

// What a reader has sorted and searched, by the name of the table: a page that follows a run makes tables anew.
const kept = new Map();

function table(head, rows, numbers = []) {
  const name = head.join(", ");
  const cell = (value, column) => {
    const isNumber = numbers.includes(column);
    return make("td", { class: isNumber ? "number" : null, "data-order": isNumber ? String(value ?? "") : null }, isNumber ? number(value) : value);
  };
  const element = make("table", {},
    make("thead", {}, make("tr", {}, head.map((title, column) => make("th", { scope: "col", class: numbers.includes(column) ? "number" : null }, title)))),
    make("tbody", {}, rows.map((row) => make("tr", {}, row.map(cell)))));
  const place = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name }, element);
  const { order = [], search = "" } = kept.get(name) ?? {};
  const made = new DataTable(element, {
    autoWidth: false, info: false, order, search: { search }, ordering: rows.length > 1, searching: rows.length > LONG,
    paging: rows.length > PAGE, pageLength: PAGE, lengthChange: false, language: { emptyTable: "nothing", zeroRecords: "none fits" },
  });
  made.on("order search", () => kept.set(name, { order: made.order(), search: made.search() }));
  return place;
}

// Puts children into a place; tables that were in it are forgotten.
function fill(place, ...children) {
  for (const old of place.querySelectorAll("table")) if (DataTable.isDataTable(old)) new DataTable(old).destroy();
  place.replaceChildren(...children);
}
