// One sequence of tokens as text: its turns, and each token in the colour of its numbers.

const COLOURS = { none: "no colour", advantage: "advantage", ratio: "log-probability ratio", logprob: "log-probability", version: "version of the weights" };
const TOOL = /<tool_call>|<function=|"tool_calls"|\[TOOL_CALLS\]/;

// A logarithm of a ratio that is no more than the rounding of two programs is pale.
const NOISE = 0.05;

// Values that repeat are written once, with their number.
function unrolled(runs) {
  return (runs ?? []).flatMap(([count, value]) => Array(Math.min(count, 4096)).fill(value));
}

// The turns of a sequence: the prompt, then what the model sampled and what the environment answered, in turn.
function turnsOf(sequence) {
  const turns = [{ kind: "prompt", text: sequence.prompt, tokens: [] }], tokens = sequence.tokens;
  if (tokens === null) return [...turns, { kind: "model", text: sequence.completion, tokens: [] }];
  const advantages = unrolled(tokens.advantages), versions = unrolled(tokens.versions);
  let at = 0, token = 0, sampled = 0;
  for (const [count, trains] of tokens.trains) {
    const turn = { kind: trains ? "model" : "environment", text: "", tokens: [] };
    for (let many = 0; many < count && token < tokens.characters.length; many += 1, token += 1) {
      const text = sequence.completion.slice(at, at + tokens.characters[token]);
      at += tokens.characters[token];
      turn.text += text;
      turn.tokens.push(trains ? {
        text, advantage: advantages[sampled], version: versions[sampled], logprob: tokens.logprobs?.[sampled], ratio: tokens.log_ratios?.[sampled],
      } : { text });
      sampled += trains ? 1 : 0;
    }
    turns.push(turn);
  }
  const rest = sequence.completion.slice(at);
  if (rest) turns.push({ kind: "rest", text: rest, tokens: [] });
  return turns.filter((turn) => turn.text || turn.kind === "model");
}

function titleOf(turn) {
  if (turn.kind === "prompt") return "prompt";
  if (turn.kind === "rest") return "more tokens, without their numbers";
  if (turn.kind === "environment") return /tool_response|"role": ?"tool"/.test(turn.text) ? "environment, answer of a tool" : "environment";
  return TOOL.test(turn.text) ? "model, calls a tool" : "model";
}

// The colour of a token: red below and blue above nothing; versions from the newest to the oldest.
function shade(token, mode, scale) {
  const value = token[mode];
  if (mode === "none" || value === undefined || value === null) return null;
  if (mode === "version") return faded(colour(0), scale.high > scale.low ? 0.08 + 0.5 * (value - scale.low) / (scale.high - scale.low) : 0.15);
  if (mode === "logprob") return faded(colour(1), Math.min(0.75, 0.75 * -value / Math.max(1e-6, -scale.low)));
  const most = Math.max(Math.abs(scale.low), Math.abs(scale.high), mode === "ratio" ? NOISE : 1e-6);
  return faded(colour(value < 0 ? 4 : 0), 0.75 * Math.abs(value) / most);
}

function scaleOf(sequences, mode) {
  let low = Infinity, high = -Infinity, known = 0, tokens = 0;
  for (const turn of sequences.flat()) for (const token of turn.tokens) {
    const value = token[mode];
    tokens += 1;
    if (value === undefined || value === null) continue;
    low = Math.min(low, value); high = Math.max(high, value); known += 1;
  }
  return { low, high, known, tokens };
}

function factsOf(token, place) {
  const facts = [`token ${place + 1}`];
  for (const [name, title] of [["advantage", "advantage"], ["ratio", "log ratio"], ["logprob", "log-probability"], ["version", "weights of step"]])
    if (token[name] !== undefined && token[name] !== null) facts.push(`${title} ${number(token[name])}`);
  return facts.join(", ");
}

function drawnTurn(turn, mode, scale, id) {
  const text = make("div", { class: "text" });
  if (turn.kind !== "model" || !turn.tokens.length) text.append(readable(turn.text));
  else turn.tokens.forEach((token, place) => {
    const of = shade(token, mode, scale);
    text.append(make("span", { title: factsOf(token, place), style: of === null ? null : `background:${of}` }, readable(token.text)));
  });
  const many = turn.tokens.length ? `${number(turn.tokens.length)} tokens` : `${number(turn.text.length)} characters`;
  return make("div", { class: `turn ${turn.kind}`, id }, make("div", { class: "of" }, titleOf(turn), make("span", { class: "quiet" }, ` ${many}`)), text);
}

function legendOf(mode, scale) {
  if (mode === "none") return "";
  if (!scale.tokens) return "This sample has no numbers of its tokens: an earlier version wrote it, or they cannot be told apart.";
  if (!scale.known) return `These tokens have no ${COLOURS[mode]}.`;
  if (mode === "version") return `Weights of step ${number(scale.low)} (pale) to ${number(scale.high)} (strong).`;
  if (mode === "logprob") return `From 0 (pale) to ${number(scale.low)} nats (strong) under the policy that sampled.`;
  const words = mode === "ratio" ? "logarithm of the probability before the step over that at sampling, in nats: " : "";
  return `${words}red below 0, blue above; from ${number(scale.low)} to ${number(scale.high)}.`;
}
