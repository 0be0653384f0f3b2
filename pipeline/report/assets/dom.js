// Elements of the page. Text of runs becomes text nodes, and never markup.

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  for (const child of children.flat(2)) if (child !== null) element.append(child);
  return element;
}

function contentOf(section) {
  return document.querySelector(`#${section} > .content`);
}

// Characters that change the direction of text or cannot be seen are shown by their numbers.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

function readable(text) {
  return text.replace(UNSEEN, (letter) => `\u27e8${letter.charCodeAt(0).toString(16).padStart(2, "0")}\u27e9`);
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e6 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}
