// The mask converter: paint or paste a mask, and see it in every convention. Without this
// script the page shows one worked example; with it, the same places show your mask.

for (const root of document.querySelectorAll(".mk")) {
  const scores = JSON.parse(root.querySelector("script").textContent); // [item][query][key]
  const form = root.querySelector("form");
  const presets = [...form.querySelectorAll(".mk-presets button")];
  const undo = form.querySelector(".mk-undo");
  const sliders = [...form.querySelectorAll("input")];
  const items = root.querySelector(".mk-items");
  const text = root.querySelector("#mk-text");
  const status = root.querySelector(".mk-status");
  const questions = root.querySelector(".mk-questions");
  const named = root.querySelector(".mk-named");
  const words = root.querySelector(".mk-words");
  const cards = [...root.querySelectorAll(".mk-card")];

  // mask[item][query][key]: may this query attend to this key?
  const state = { mask: null, heads: 0, preset: "" };

  const sizesOf = (mask) => ({ B: mask.length, Q: mask[0].length, K: mask[0][0].length });
  const build = ({ B, Q, K }, allows) =>
    Array.from({ length: B }, (_, b) =>
      Array.from({ length: Q }, (_, q) =>
        Array.from({ length: K }, (_, k) => allows(q, k, b)),
      ),
    );

  // Masks with a name, and how Python calls them at these sizes

  const lens = (B, of) =>
    `torch.tensor([${Array.from({ length: B }, (_, b) => of(b)).join(", ")}])`;
  const valid = (K, b, B) => Math.max(1, K - 2 * (B === 1 ? 1 : b));
  const prefix = (Q, K, b) => Math.max(0, Math.ceil((K + Math.max(0, K - Q)) / 2) - b);
  const halves = (n) => `torch.tensor([${Math.ceil(n / 2)}, ${Math.floor(n / 2)}])`;
  const second = (n, i) => i >= Math.ceil(n / 2);

  const PRESETS = {
    causal: {
      allows: (q, k, b, { Q, K }) => k <= q + K - Q,
      code: ({ Q, K }) => `masks.causal(${Q}, ${K})`,
    },
    "causal, top left": {
      allows: (q, k) => k <= q,
      code: ({ Q, K }) => `masks.causal(${Q}, ${K}, corner="top left")`,
    },
    padding: {
      allows: (q, k, b, { B, K }) => k < valid(K, b, B),
      code: ({ B, K }) => `masks.padding(${lens(B, (b) => valid(K, b, B))}, k_len=${K})`,
    },
    "sliding window": {
      allows: (q, k, b, { Q, K }) => k <= q + K - Q && k > q + K - Q - 2,
      code: ({ Q, K }) => `masks.sliding_window(${Q}, ${K}, window=2)`,
    },
    "prefix LM": {
      allows: (q, k, b, { Q, K }) => k <= q + K - Q || k < prefix(Q, K, b),
      code: ({ B, Q, K }) =>
        `masks.prefix_lm(${lens(B, (b) => prefix(Q, K, b))}, ${Q}, ${K})`,
    },
    "packed documents": {
      allows: (q, k, b, { Q, K }) => second(Q, q) === second(K, k),
      code: ({ Q, K }) => `masks.block_diagonal(${halves(Q)}, ${halves(K)})`,
    },
    all: {
      allows: () => true,
      code: ({ B, Q, K }) => `torch.ones(${Q}, ${K}, ${B}, dtype=torch.bool)`,
    },
    none: {
      allows: () => false,
      code: ({ B, Q, K }) => `torch.zeros(${Q}, ${K}, ${B}, dtype=torch.bool)`,
    },
  };

  const preset = (name, sizes) =>
    build(sizes, (q, k, b) => PRESETS[name].allows(q, k, b, sizes));
  const same = (one, other) => `${one}` === `${other}`;

  // The mask as text, which is also the link: rows of 0 and 1, items after a slash

  const written = (mask) =>
    mask.map((item) => item.map((row) => row.map(Number).join("")).join(" ")).join(" / ");

  /** The mask that rows of 0 and 1 stand for. */
  const read = (text) => {
    const items = text.trim().split("/");
    const mask = items.map((item) => {
      // Cells apart, a row on each line: as a matrix is printed.
      const lines = item.trim().split(/\s*\n\s*/);
      const apart = lines.length > 1 && lines.every((line) => /^\d(\s\d)+$/.test(line));
      const rows = apart ? lines.map((line) => line.replace(/\s/g, "")) : item.split(/\s+/);
      return rows.filter(Boolean).map((row) => [...row].map((cell) => cell === "1"));
    });
    if (mask.some((rows) => !rows.length)) throw Error("a batch item is empty");
    rankOf(mask);
    return checkSizes(mask);
  };

  const SIZES = { B: [3, "batch item"], Q: [8, "query"], K: [8, "key"] };

  /** Refuse a mask that is larger than what can be painted. */
  const checkSizes = (mask) => {
    for (const [size, n] of Object.entries(sizesOf(mask))) {
      const [most, word] = SIZES[size];
      if (n > most) throw Error(`${count(n, word)}: this page shows at most ${most}`);
    }
    return mask;
  };

  /** The number of axes of nested lists; refuses parts that differ from the first. */
  const rankOf = (lists) => {
    const lengths = [];
    for (let part = lists; Array.isArray(part); part = part[0]) lengths.push(part.length);
    const check = (part, depth, where) => {
      if (Array.isArray(part) !== depth < lengths.length) {
        throw Error(`${where}: a number stands beside a list`);
      }
      if (depth === lengths.length) return;
      const word = depth + 1 < lengths.length ? "row" : "cell";
      if (part.length !== lengths[depth]) {
        throw Error(`${where} has ${count(part.length, word)}, not ${lengths[depth]}`);
      }
      for (const [n, each] of part.entries()) {
        check(each, depth + 1, where ? `${where}, ${word} ${n}` : `${word} ${n}`);
      }
    };
    check(lists, 0, "");
    return lengths.length;
  };

  const toLink = () => {
    const mask = written(state.mask).replaceAll(" / ", "_").replaceAll(" ", ".");
    history.replaceState(null, "", `#mask=${mask}&heads=${state.heads}`);
  };

  const fromLink = () => {
    const asked = new URLSearchParams(location.hash.slice(1));
    const mask = (asked.get("mask") ?? "").replaceAll("_", "/").replaceAll(".", " ");
    if (!/^[01 /]+$/.test(mask)) return;
    try {
      show(read(mask), Number(asked.get("heads")));
      keep();
    } catch {
      // A link that was cut off changes nothing.
    }
  };

  // What changed can be undone, up to a limit; a stroke of the pointer is one change.

  const past = []; // each as text, with its heads
  let now = "";

  const inText = () => `${written(state.mask)}|${state.heads}`;

  /** Keep the mask in the address, and the one before it to go back to. */
  const keep = () => {
    const next = inText();
    if (now && next !== now) past.push(now);
    if (past.length > 100) past.shift();
    now = next;
    undo.disabled = !past.length;
    toLink();
  };

  const goBack = () => {
    if (!past.length) return;
    now = past.pop();
    const [mask, heads] = now.split("|");
    show(read(mask), Number(heads));
    undo.disabled = !past.length;
    toLink();
  };

  // A mask that was pasted: printed by a library, in a convention that must be found out

  const NUMBER = /^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i;
  const LOW = -1e4; // libraries write so little, or less, instead of minus infinity

  /** The nested lists in a text of Python or NumPy, and what their entries are. */
  const parse = (text) => {
    if (text.includes("...")) {
      throw Error("`...` stands for numbers that were not printed; print all of them");
    }
    const bare = text
      .replace(/torch\.finfo\([\w.]+\)\.min/g, "-inf")
      .replace(/-\s*((torch|np|numpy|math)\.)?inf\b|float\(\s*["']-inf["']\s*\)/g, "-inf")
      .replace(/^\s*low = .*\n/, "")
      .replace(/\blow\b/g, "-inf")
      .replace(/^\s*\w+\s*=(?!=)/, "")
      .replace(/,?\s*\b(dtype|device|requires_grad|grad_fn)=[^,)]*/g, "")
      .replace(/\.(bool|int|long|float|permute|to|cuda|cpu)\([^()]*\)/g, " ")
      .replace(/\b((torch|np|numpy|tf|jnp)\.)?(\w*[tT]ensor|as\w*array|array)\(/g, " ")
      .replace(/[(),]/g, " ");
    const root = [];
    const open = [root];
    const cells = [];
    for (const token of bare.match(/[[\]]|[^\s[\]]+/g) ?? []) {
      if (token === "[") {
        const list = [];
        open.at(-1).push(list);
        open.push(list);
      } else if (token === "]") {
        if (open.length === 1) throw Error("`]` closes no bracket");
        open.pop();
      } else {
        open.at(-1).push(entry(token));
        cells.push(token);
      }
    }
    if (open.length > 1) throw Error(`${count(open.length - 1, "bracket")} not closed`);
    const value = root.length === 1 ? root[0] : root;
    if (!Array.isArray(value) || !cells.length || !root.every(Array.isArray)) {
      throw Error("type rows of 0 and 1, or paste a tensor in brackets");
    }
    return { value, rank: rankOf(value), kind: kindOf(cells) };
  };

  const entry = (token) => {
    if (/^(true|false)$/i.test(token)) return token.toLowerCase() === "true";
    if (token === "-inf") return -Infinity;
    if (NUMBER.test(token)) return Number(token);
    throw Error(`\`${token}\` is no entry of a mask`);
  };

  /** What entries are: flags, whose meaning is unknown; additive; or lengths. */
  const kindOf = (cells) => {
    const values = cells.map(entry);
    if (values.every((each) => typeof each === "boolean")) return "bool";
    if (values.some((each) => typeof each === "boolean")) {
      throw Error("bools and numbers are mixed");
    }
    const isFloat = cells.some((cell) => /[.e]|inf/i.test(cell));
    const isAdditive = values.some((each) => each <= LOW) || !values.some(Boolean);
    if (isFloat && isAdditive) {
      const bias = cells.find((cell) => entry(cell) > LOW && entry(cell) !== 0);
      if (bias) throw Error(`an additive mask holds 0 and -inf, not \`${bias}\``);
      return "additive";
    }
    if (values.every((each) => each === 0 || each === 1)) return "0 and 1";
    if (values.every((each) => Number.isInteger(each) && each >= 0)) return "lengths";
    const odd = cells.find((cell) => entry(cell) !== 0 && entry(cell) !== 1);
    throw Error(`\`${odd}\` is neither 0, 1, -inf nor a length`);
  };

  const flags = ["bool", "0 and 1", "additive"];
  const whole = ["lengths", "0 and 1"];

  /** The axes that a text may have: each with what it gives, or nothing. */
  const READINGS = [
    ["[q_len, k_len]", 2, flags, (value) => [value]],
    [
      "[batch_size, k_len], as in a padding mask",
      2,
      flags,
      (value, { Q }) => value.map((row) => Array(Q).fill(row)),
    ],
    ["[batch_size, q_len, k_len]", 3, flags, (value) => value],
    [
      "[batch_size * heads, q_len, k_len]",
      3,
      flags,
      (value, _, heads) => {
        const [parts, rest] = [value.length / heads, value.length % heads];
        if (heads === 1 || rest) return null;
        const items = Array.from({ length: parts }, (_, b) => value[b * heads]);
        return value.every((each, n) => same(each, items[Math.floor(n / heads)]))
          ? items
          : null;
      },
    ],
    [
      "[q_len, k_len, batch_size]",
      3,
      flags,
      (value) =>
        build(
          { B: value[0][0].length, Q: value.length, K: value[0].length },
          (q, k, b) => value[q][k][b],
        ),
    ],
    [
      "[batch_size, heads, q_len, k_len]",
      4,
      flags,
      (value) =>
        value.every((item) => item.every((head) => same(head, item[0])))
          ? value.map((item) => item[0])
          : null,
    ],
    ["[k_len]", 1, flags, (value, { Q }) => [Array(Q).fill(value)]],
    [
      "[batch_size], valid lengths",
      1,
      whole,
      (value, { Q, K }) =>
        build(
          { B: value.length, Q, K: Math.max(K, ...value) },
          (q, k, b) => k < value[b],
        ),
    ],
    [
      "[batch_size, q_len], valid lengths",
      2,
      whole,
      (value, { K }) =>
        build(
          { B: value.length, Q: value[0].length, K: Math.max(K, ...value.flat()) },
          (q, k, b) => k < value[b][q],
        ),
    ],
    ["[documents + 1], cu_seqlens", 1, whole, (value) => packed(value, value)],
    [
      "[documents + 1] of queries and of keys, cu_seqlens",
      2,
      whole,
      (value) => (value.length === 2 ? packed(...value) : null),
    ],
  ];

  /** The mask of packed documents, from where they begin and the last one ends. */
  const packed = (queries, keys) => {
    const rises = (starts) => starts.every((each, n) => (n ? each >= starts[n - 1] : !each));
    if (![queries, keys].every((s) => rises(s) && s.at(-1) > 0)) return null;
    const of = (starts, n) => starts.findLastIndex((first) => first <= n);
    return build(
      { B: 1, Q: queries.at(-1), K: keys.at(-1) },
      (q, k) => of(queries, q) === of(keys, k),
    );
  };

  const MEANINGS = {
    "may attend": "scaled_dot_product_attention, FlexAttention, Keras, Hugging Face",
    hidden: "nn.MultiheadAttention (attn_mask, key_padding_mask)",
  };

  /** Ask what the text leaves open; an answer holds while texts of its kind follow. */
  const answers = {};

  const ask = (topic, title, options) => {
    const group = make("fieldset", {}, make("legend", {}, title));
    for (const [value, label] of options) {
      const choice = make("input", { type: "radio", name: topic, value });
      choice.checked = answers[topic] === value;
      choice.addEventListener("change", () => {
        answers[topic] = value;
        fromText();
        keep();
      });
      group.append(make("label", {}, choice, ` ${label}`));
    }
    questions.append(group);
  };

  const say = (message, wrong = false) => {
    const parts = message.split("`");
    status.replaceChildren(
      ...parts.map((part, i) => (i % 2 ? make("code", {}, part) : part)),
    );
    status.classList.toggle("mk-wrong", wrong);
    text.ariaInvalid = wrong;
    text.setCustomValidity(wrong ? message : "");
  };

  /** Show the mask that was typed or pasted, or say what is wrong with it. */
  const fromText = () => {
    try {
      if (/^[01\s/]+$/.test(text.value.trim())) {
        questions.replaceChildren();
        const mask = read(text.value);
        say("");
        show(mask, state.heads, true);
      } else fromPasted(parse(text.value));
    } catch ({ message }) {
      questions.replaceChildren();
      say(`Not a mask: ${message}.`, true);
    }
  };

  const fromPasted = ({ value, rank, kind }) => {
    if (answers.kind !== `${kind} ${rank}`) {
      for (const topic of ["axes", "meaning"]) delete answers[topic];
      answers.kind = `${kind} ${rank}`;
    }
    const [sizes, refusals] = [sizesOf(state.mask), []];
    const found = READINGS.filter(([, axes, kinds]) => axes === rank && kinds.includes(kind))
      .map(([name, , , of]) => [name, of(value, sizes, state.heads)])
      .filter(([, mask]) => {
        try {
          return mask && checkSizes(mask);
        } catch ({ message }) {
          refusals.push(message);
          return false;
        }
      });
    if (!found.length) throw Error(refusals[0] ?? `no mask has ${rank} axes of ${kind}`);

    const focused = document.activeElement;
    const [name, mask] = found.find(([each]) => each === answers.axes) ?? found[0];
    answers.axes = name;
    const isOpen = !/valid|cu_/.test(name) && kind !== "additive";
    const flag = kind === "bool" ? "True" : "1";
    questions.replaceChildren();
    if (isOpen) {
      const meanings = Object.entries(MEANINGS);
      const options = meanings.map(([word, who]) => [word, `${word}: ${who}`]);
      ask("meaning", `What does ${flag} mean here?`, options);
    }
    if (found.length > 1) {
      ask("axes", "Which axes are these?", found.map(([each]) => [each, each]));
    }
    if (focused.name in answers) {
      questions.querySelector(`[name=${focused.name}]:checked`)?.focus();
    }
    if (isOpen && !answers.meaning) {
      say(`Libraries disagree on what ${flag} means: choose its meaning.`);
      return;
    }
    const meaning = isOpen ? `: ${flag} means ${answers.meaning}` : "";
    say(`Read as ${kind}, ${name}${meaning}.`);
    const allows = { bool: Boolean, "0 and 1": Boolean, additive: (each) => each > LOW };
    const inverts = isOpen && answers.meaning === "hidden";
    const may = each(mask, (cell) => (allows[kind] ?? Boolean)(cell) !== inverts);
    show(may, state.heads, true);
  };

  // The weights: softmax over the keys that a query may attend to, zero where there are none

  const softmax = (row, allowed) => {
    const powers = row.map((score, k) => (allowed[k] ? Math.exp(score) : 0));
    const sum = powers.reduce((a, b) => a + b, 0);
    return powers.map((power) => (sum ? power / sum : 0));
  };

  // Cividis: even in lightness, and the same to people who see no red or green.
  const CIVIDIS = [
    [0, 34, 78],
    [67, 78, 108],
    [125, 124, 120],
    [188, 174, 108],
    [254, 232, 56],
  ];

  const paint = (cell, part) => {
    const place = Math.min(3, Math.floor(part * 4));
    const rgb = CIVIDIS[place].map((from, i) =>
      Math.round(from + (CIVIDIS[place + 1][i] - from) * (part * 4 - place)),
    );
    cell.style.background = `rgb(${rgb})`;
    cell.style.color = part > 0.46 ? "#000" : "#fff";
  };

  // The grids, laid out anew when a size changes

  let cells = []; // cells[item][query][key], a button
  let weights = [];

  const table = (b, caption, properties, rows) => {
    const head = make("tr", {}, make("td"));
    for (const k of rows[0].keys()) head.append(make("th", { scope: "col" }, k));
    const lines = rows.map((row, q) =>
      make(
        "tr",
        {},
        make("th", { scope: "row" }, q),
        ...row.map((cell) => make("td", {}, cell)),
      ),
    );
    return make(
      "table",
      properties,
      make("caption", {}, `${caption}, item ${b}`),
      make("thead", {}, head),
      make("tbody", {}, ...lines),
    );
  };

  const layOut = (sizes) => {
    cells = build(sizes, (q, k, b) =>
      make(
        "button",
        {
          type: "button",
          className: "mk-cell",
          tabIndex: q || k ? -1 : 0,
          "aria-label": `query ${q}, key ${k}, item ${b}: may attend`,
          "data-at": `${b},${q},${k}`,
        },
        "",
      ),
    );
    weights = build(sizes, () => make("span", { className: "mk-weight" }));
    items.replaceChildren(
      ...cells.map((rows, b) =>
        make(
          "div",
          {},
          table(b, "mask", { role: "grid", className: "mk-grid" }, rows),
          table(b, "weights", { className: "mk-grid" }, weights[b]),
        ),
      ),
    );
  };

  // What each convention calls the mask, or why it cannot: the words are those of Python

  const each = (lists, say) =>
    Array.isArray(lists) ? lists.map((list) => each(list, say)) : say(lists);

  /** Nested lists, the rows of the innermost below one another. */
  const nested = (lists, pad) => {
    if (!Array.isArray(lists)) return lists;
    const joint = Array.isArray(lists[0]) ? `,\n${" ".repeat(pad + 1)}` : ", ";
    return `[${lists.map((list) => nested(list, pad + 1)).join(joint)}]`;
  };

  const tensor = (lists) => `torch.tensor(${nested(lists, 13)})`;
  const integers = (lists) => tensor(each(lists, Number));
  const bools = (lists) => `${integers(lists)}.bool()`;
  const hidden = (lists) => bools(each(lists, (may) => !may));
  const additive = (lists, low = "-torch.inf") =>
    `low = ${low}\n${tensor(each(lists, (may) => (may ? " 0." : "low")))}`;

  /** `[batch_size * heads, q_len, k_len]`, or one mask for all. */
  const forHeads = (mask) =>
    mask.length > 1
      ? mask.flatMap((item) => Array.from({ length: state.heads }, () => item))
      : mask[0];

  /** Refuse a mask that is not as it would have to be, with the first place. */
  const check = (mask, needed, reason) => {
    const { B, Q, K } = sizesOf(mask);
    for (let q = 0; q < Q; q++) {
      for (let k = 0; k < K; k++) {
        for (let b = 0; b < B; b++) {
          if (mask[b][q][k] === needed(q, k, b)) continue;
          const does = mask[b][q][k] ? `shows key ${k} to` : `hides key ${k} from`;
          const said = `${does} query ${q} of batch item ${b}`;
          throw Error(`\`mask\` ${reason(said, q, k, b)}`);
        }
      }
    }
  };

  /** `[batch_size, k_len]`, where all queries see the same. */
  const keysOf = (mask) => {
    const reason = (_, q, k, b) =>
      `treats key ${k} of batch item ${b} differently for queries 0 and ${q}, which ` +
      "a [batch_size, k_len] mask cannot represent; use `to_sdpa` or `to_mha`";
    check(mask, (q, k, b) => mask[b][0][k], reason);
    return mask.map((item) => item[0]);
  };

  /** `[batch_size, q_len]` or `[batch_size]`, where the keys that are seen come first. */
  const lensOf = (mask) => {
    const lens = mask.map((item) => item.map((row) => row.filter(Boolean).length));
    const reason = (said) =>
      `${said}, but shows a later one, which lengths cannot represent; use \`to_sdpa\``;
    check(mask, (q, k, b) => k < lens[b][q], reason);
    return lens[0].length === 1 ? lens.flat() : lens;
  };

  const isCausal = (mask) => {
    const where = "its corner is top left; use `to_sdpa`";
    const reason = (said) => `${said}, but \`is_causal\` does not: ${where}`;
    check(mask, (q, k) => k <= q, reason);
    return "True";
  };

  /** Where packed documents begin, and the last one ends: for queries, for keys. */
  const documentsOf = (mask) => {
    const { B, Q, K } = sizesOf(mask);
    if (B > 1) throw Error(`\`mask\` has ${B} batch items; packed, it has 1`);
    const [seen] = mask;
    const ends = indices(seen.map((row, q) => q && !same(row, seen[q - 1])));
    const corners = [[0, 0]]; // a document is a block, from one corner to the next
    let start = 0;
    for (const end of [...ends, Q]) {
      const keys = indices(seen[start]);
      if (keys.length) corners.push([start, keys[0]]);
      corners.push([end, keys.length ? keys.at(-1) + 1 : corners.at(-1)[1]]);
      start = end;
    }
    corners.push([Q, K]);
    const unique = corners.filter(
      (each, i) => !corners.slice(0, i).some((c) => same(c, each)),
    );
    const [queries, keys] = [0, 1].map((axis) =>
      unique.map((_, i) => Math.max(...unique.slice(0, i + 1).map((each) => each[axis]))),
    );
    const of = (starts, n) => starts.findLastIndex((first) => first <= n);
    const reason = (said) =>
      `${said}, but packed documents do not: ` +
      "each attends to all of itself, and to nothing else";
    check(mask, (q, k) => of(queries, q) === of(keys, k), reason);
    return [queries, keys];
  };

  const RULE = "lambda b, h, q, k: mask[q, k, b]";

  const CONVENTIONS = {
    ours: (mask) => `${bools(mask)}.permute(1, 2, 0)`,
    mha: (mask) => hidden(forHeads(mask)),
    "mha-float": (mask) => additive(forHeads(mask)),
    "key-padding": (mask) => hidden(keysOf(mask)),
    sdpa: (mask) => bools(mask.map((item) => [item])),
    "sdpa-float": (mask) => additive(mask.map((item) => [item])),
    keras: (mask) => bools(mask),
    "key-mask": (mask) => bools(keysOf(mask)),
    "huggingface-keys": (mask) => integers(keysOf(mask)),
    "valid-lens": (mask) => tensor(lensOf(mask)),
    "cu-seqlens": (mask) =>
      `(${documentsOf(mask)
        .map((n) => `${tensor(n)}.int()`)
        .join(",\n ")})`,
    "is-causal": isCausal,
    "mask-mod": () => RULE,
    "block-mask": (mask) => {
      const { B, Q, K } = sizesOf(mask);
      return `create_block_mask(\n    ${RULE}, ${B}, None, ${Q}, ${K}, "cpu")`;
    },
    huggingface: (mask) =>
      additive(
        mask.map((item) => [item]),
        "torch.finfo(torch.float32).min",
      ),
  };

  // What a mask does, in the words of `describe` in masks/describe.py, rule by rule

  const [EVERYTHING, NOTHING] = ["every query sees every key", "no query sees any key"];
  const [ROWS, RUNS] = [12, 8]; // after so many rows and runs, the rest is only counted

  const indices = (flags) => [...flags.keys()].filter((n) => flags[n]);
  const some = (seen) => seen.map((row) => row.includes(true));
  const turned = (seen) => seen[0].map((_, k) => seen.map((row) => row[k]));

  const grouped = (values) => {
    const positions = new Map();
    values.forEach((value, n) =>
      positions.set(value, [...(positions.get(value) ?? []), n]),
    );
    return positions;
  };

  const plural = (word) => (word === "query" ? "queries" : `${word}s`);
  const count = (n, word) => `${n} ${n === 1 ? word : plural(word)}`;
  const sees = (numbers) => (numbers.length === 1 ? "sees" : "see");
  const joined = (parts) => {
    const shown = parts.slice(0, RUNS);
    if (parts.length > RUNS) shown.push(`${parts.length - RUNS} more`);
    const last = shown.pop();
    return shown.length ? `${shown.join(", ")} and ${last}` : `${last}`;
  };
  const titled = (word, numbers) => {
    const ends = numbers.filter((n) => !numbers.includes(n + 1));
    const starts = numbers.filter((n) => !numbers.includes(n - 1));
    const runs = starts.map((a, i) => (a < ends[i] ? `${a}–${ends[i]}` : `${a}`));
    return `${numbers.length === 1 ? word : plural(word)} ${joined(runs)}`;
  };

  /** The rules that could give a mask, each with what it allows. */
  function* rulesFor(seen) {
    yield [EVERYTHING, () => true];
    const [Q, K] = [seen.length, seen[0].length];
    if (Q === 1) return;
    const own = K - Q;
    const [rows, keys] = [indices(some(seen)), indices(some(turned(seen)))];
    const [top, bottom] = [indices(seen[rows[0]]), indices(seen[rows.at(-1)])];
    const reach = top.at(-1) === keys.at(-1) ? own : top.at(-1) - rows[0];
    const back = bottom[0] === keys[0] ? null : bottom[0] - rows.at(-1);
    const corner = own ? ", corner bottom right" : "";
    yield [`causal${corner}`, (q, k) => k - q <= own];
    if (own) yield ["causal, corner top left", (q, k) => k <= q];
    if (reach !== own) {
      const side = reach > own ? "beyond" : "short of";
      const far = count(Math.abs(reach - own), "key");
      yield [`causal, but ${far} ${side} its own`, (q, k) => k - q <= reach];
    }
    if (back !== null) {
      const [before, after] = [own - back, reach - own];
      const band = (q, k) => back <= k - q && k - q <= reach;
      if (own && !reach) {
        yield [`window of ${1 - back}, corner top left`, band];
      } else if (before >= 0 && after >= 0) {
        const sides = after ? `, ${before} before its own key and ${after} after` : "";
        yield [`window of ${before + 1 + after}${sides}${corner}`, band];
      }
    }
    if (rows[0] === 0 && top.at(-1) > own) {
      const last = top.at(-1);
      const name = `prefix of ${last + 1}, then causal${corner}`;
      yield [name, (q, k) => k <= last || k - q <= own];
    }
    if (!own) yield* documents(seen, rows);
  }

  function* documents(seen, rows) {
    const first = seen.map((row) => Math.max(0, row.indexOf(true)));
    const starts = first.slice(rows[0], rows.at(-1) + 1);
    const lengths = [...grouped(starts).values()].map((positions) => positions.length);
    if (lengths.length < 2 || starts.length !== rows.length) return;
    if (starts.some((start, i) => start < starts[i - 1])) return;
    const filled = some(seen);
    const equal = (q, k) => first[q] === first[k] && filled[k];
    const names = `documents of ${joined(lengths)}`;
    yield [names, equal];
    yield [`${names}, causal within each`, (q, k) => equal(q, k) && k <= q];
  }

  /** The first rule that gives a mask, if need be between padded keys. */
  const itemOf = (seen) => {
    const filled = some(seen);
    const keys = indices(some(turned(seen)));
    if (!keys.length) return { rule: NOTHING, padded: [0, 0], empty: [] };
    const [low, high, end] = [keys[0], keys.at(-1), seen[0].length - 1];
    for (const [from, to] of [
      [0, end],
      [low, high],
    ]) {
      for (const [rule, allows] of rulesFor(seen)) {
        const may = (q, k) => from <= k && k <= to && allows(q, k);
        const missing = seen.filter(
          (row, q) => !filled[q] && row.some((_, k) => may(q, k)),
        );
        const fits = seen.every((row, q) =>
          row.every((cell, k) => cell === (filled[q] && may(q, k))),
        );
        if (fits && missing.length <= filled.filter(Boolean).length) {
          const empty = indices(filled.map((any) => !any));
          return { rule, padded: [from, end - to], empty };
        }
      }
    }
    return { rule: "", padded: [0, 0], empty: [] };
  };

  /** What is so: the rules, the rows where there is none, and what is left out. */
  function* facts(mask, all) {
    const alone = all.length === 1;
    const ruled = grouped(all.map((item) => item.rule));
    const silent = ruled.get(NOTHING) ?? [];
    ruled.delete(NOTHING);
    for (const [rule, numbers] of ruled) {
      if (rule)
        yield ruled.size === 1 ? rule : `${titled("batch item", numbers)}: ${rule}`;
    }
    yield* rowsAloud(mask, ruled.get("") ?? []);
    for (const [end, where] of ["start", "end"].entries()) {
      for (const [n, numbers] of grouped(all.map((item) => item.padded[end]))) {
        const verb = numbers.length === 1 ? "has" : "have";
        const who = alone ? "" : `${titled("batch item", numbers)} ${verb} `;
        if (n) yield `${who}${count(n, "padded key")} at the ${where}`;
      }
    }
    for (const numbers of grouped(all.map((item) => `${item.empty}`)).values()) {
      const { empty } = all[numbers[0]];
      const whose = alone ? "" : ` of ${titled("batch item", numbers)}`;
      if (empty.length) yield `${titled("query", empty)}${whose} ${sees(empty)} nothing`;
    }
    if (silent.length === all.length) yield NOTHING;
    else if (silent.length)
      yield `${titled("batch item", silent)} ${sees(silent)} nothing`;
  }

  /** The keys that each query of some items sees; equal items and rows said once. */
  function* rowsAloud(mask, numbers) {
    let [spoken, rest] = [0, 0];
    for (const positions of grouped(numbers.map((n) => `${mask[n]}`)).values()) {
      const group = positions.map((i) => numbers[i]);
      const rows = mask[group[0]];
      const whose = mask.length > 1 ? `${titled("batch item", group)}: ` : "";
      const starts = indices(rows.map((row, q) => !q || !same(row, rows[q - 1])));
      for (const [i, start] of starts.entries()) {
        const queries = indices(
          rows.map((_, q) => start <= q && q < (starts[i + 1] ?? Infinity)),
        );
        if (++spoken > ROWS) {
          rest += queries.length;
          continue;
        }
        const keys = indices(rows[start]);
        const who = rows.length > 1 ? titled("query", queries) : "every query";
        const what = keys.length ? titled("key", keys) : "nothing";
        yield `${whose}${who} ${sees(queries)} ${what}`;
      }
    }
    if (rest) yield `and ${count(rest, "more row")}`;
  }

  /** What is usual, and usually a mistake. */
  function* warnings(mask, all) {
    const alone = all.length === 1;
    const { Q, K } = sizesOf(mask);
    const guesses = new Map();
    for (const [n, { rule }] of all.entries()) {
      const opposite = rule ? "" : itemOf(each(mask[n], (may) => !may)).rule;
      if (opposite && opposite !== EVERYTHING && opposite !== NOTHING)
        guesses.set(n, opposite);
    }
    for (const [n, rule] of [...guesses].slice(0, 1)) {
      const whose = alone ? "its opposite" : `the opposite of batch item ${n}`;
      yield `warning: looks inverted: ${whose} is ${rule}; use ~mask`;
    }
    const silent = indices(all.map((item) => item.rule === NOTHING));
    const others = all.filter((item) => item.rule !== NOTHING);
    const last = ({ rule, padded }) => rule === EVERYTHING && padded[0] && !padded[1];
    if (silent.length && others.length && others.every(last)) {
      const who = `${titled("batch item", silent)} ${sees(silent)} nothing`;
      yield `warning: looks inverted: only last keys are seen, and ${who}; use ~mask`;
    }
    if (all.some((item) => item.rule.endsWith("corner top left"))) {
      const sizes = `${count(Q, "query")} and ${count(K, "key")}`;
      yield (
        `warning: with ${sizes} the corner matters: ` +
        `this is top left, masks.causal(${Q}, ${K}) is not`
      );
    }
    for (const [n, item] of all.entries()) {
      const place = guesses.has(n) ? null : leak(mask[n], item);
      if (!place) continue;
      const whose = alone ? "" : ` of batch item ${n}`;
      yield `warning: leaks the future: query ${place[0]}${whose} sees key ${place[1]}`;
      return;
    }
  }

  /** A key of the future that is seen by a mask which is otherwise about causal. */
  const leak = (seen, { rule, padded }) => {
    const own = seen[0].length - seen.length;
    const cells = seen.flatMap((row, q) => row.map((may, k) => [q, k, may, k - q > own]));
    const leaks = cells.filter(([, , may, future]) => may && future);
    // Behind padded keys, a window to both sides looks the same.
    if (rule) return rule.includes("beyond") && !padded[0] ? leaks[0] : null;
    const rowsOf = (of) => new Set(of.map(([q]) => q)).size;
    const past = cells.filter(([, , , future]) => !future);
    if (2 * rowsOf(leaks) > rowsOf(cells.filter(([, , , future]) => future))) return null;
    return 2 * past.filter(([, , may]) => may).length < past.length ? null : leaks[0];
  };

  const describe = (mask) => {
    const { B, Q, K } = sizesOf(mask);
    const all = mask.map(itemOf);
    const queries = Q === 1 ? "all queries alike" : count(Q, "query");
    const batch = B === 1 ? "all batch items alike" : count(B, "batch item");
    const sizes = `${queries}, ${count(K, "key")}, ${batch}`;
    return [sizes, ...facts(mask, all), ...warnings(mask, all)];
  };

  /** Show a mask: in the grids, in words, and in every convention. */
  function show(mask, heads = state.heads, keepsText = false) {
    const sizes = sizesOf(mask);
    if (Number.isInteger(heads) && heads >= 1 && heads <= 4) state.heads = heads;
    if (!state.mask || !same(Object.values(sizes), Object.values(sizesOf(state.mask)))) {
      layOut(sizes);
    }
    state.mask = mask;

    const fits = (name) => same(mask, preset(name, sizes));
    if (!state.preset || !fits(state.preset)) {
      state.preset = Object.keys(PRESETS).find(fits) ?? "";
    }
    for (const button of presets)
      button.ariaPressed = button.textContent === state.preset;
    named.textContent = state.preset ? PRESETS[state.preset].code(sizes) : "–";

    mask.forEach((item, b) =>
      item.forEach((row, q) => {
        const shares = softmax(scores[b][q].slice(0, sizes.K), row);
        row.forEach((may, k) => {
          const cell = cells[b][q][k];
          cell.ariaPressed = may;
          cell.textContent = Number(may);
          cell.className = `mk-cell mk-${Number(may)}`;
          const weight = weights[b][q][k];
          weight.textContent = shares[k] % 1 ? shares[k].toFixed(2) : shares[k];
          paint(weight, shares[k]);
        });
      }),
    );

    if (!keepsText) {
      text.value = written(mask);
      questions.replaceChildren();
      say("");
    }
    const size = {
      q_len: sizes.Q,
      k_len: sizes.K,
      batch_size: sizes.B,
      heads: state.heads,
    };
    for (const slider of sliders) slider.value = size[slider.name];
    for (const number of root.querySelectorAll("[data-size]")) {
      number.textContent = size[number.dataset.size];
    }

    words.replaceChildren(
      ...describe(mask).map((line) =>
        make("li", { className: line.startsWith("warning:") ? "mk-warning" : "" }, line),
      ),
    );

    for (const card of cards) {
      const [value, refusal] = [".mk-value", ".mk-refusal"].map((c) =>
        card.querySelector(c),
      );
      let [code, reason] = ["", ""];
      try {
        code = CONVENTIONS[card.dataset.convention](mask);
      } catch ({ message }) {
        reason = message;
      }
      value.querySelector("code").textContent = code;
      value.hidden = !code;
      const parts = reason.split("`");
      refusal.replaceChildren(
        ...parts.map((part, i) => (i % 2 ? make("code", {}, part) : part)),
      );
      refusal.hidden = !reason;
      card.querySelector("button").disabled = !code;
    }
  }

  // Painting: by pointer, along its way; or by key

  let brush = null; // what the pointer paints while it is down

  const set = (cell, may) => {
    const [b, q, k] = cell.dataset.at.split(",").map(Number);
    if (state.mask[b][q][k] === may) return;
    const mask = each(state.mask, (cell) => cell);
    mask[b][q][k] = may;
    show(mask);
  };
  const isOn = (cell) => cell.ariaPressed === "true";

  items.addEventListener("pointerdown", (event) => {
    const cell = event.target.closest("button");
    if (!cell || event.button) return;
    brush = !isOn(cell);
    set(cell, brush);
  });
  addEventListener("pointermove", (event) => {
    if (brush === null) return;
    for (const { clientX, clientY } of event.getCoalescedEvents()) {
      const cell = document
        .elementFromPoint(clientX, clientY)
        ?.closest(".mk button.mk-cell");
      if (cell) set(cell, brush);
    }
  });
  for (const end of ["pointerup", "pointercancel"]) {
    addEventListener(end, () => {
      if (brush !== null) keep();
      brush = null;
    });
  }
  // A click that no pointer made: by a key, or by a reader of the screen.
  items.addEventListener("click", ({ target, detail }) => {
    const cell = target.closest("button");
    if (!cell || detail) return;
    set(cell, !isOn(cell));
    keep();
  });
  items.addEventListener("keydown", (event) => {
    const cell = event.target.closest("button");
    const ways = {
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
    };
    const way = ways[event.key];
    if (!cell || !way) return;
    event.preventDefault();
    const [b, q, k] = cell.dataset.at.split(",").map(Number);
    const next = cells[b][q + way[0]]?.[k + way[1]];
    next?.focus();
  });
  // One tab stop an item: the cell that had the focus last.
  items.addEventListener("focusin", ({ target }) => {
    const stops = target.closest("table").querySelectorAll("[tabindex='0']");
    for (const stop of stops) stop.tabIndex = -1;
    target.tabIndex = 0;
  });

  // Presets, sizes, text and link

  for (const button of presets) {
    button.addEventListener("click", () => {
      state.preset = button.textContent;
      show(preset(state.preset, sizesOf(state.mask)));
      keep();
    });
  }
  form.addEventListener("input", () => {
    const [Q, K, B, heads] = sliders.map((slider) => slider.valueAsNumber);
    const { mask } = state;
    const sizes = { B, Q, K };
    // A preset stays what it is; of a painted mask remains what fits, and more may attend.
    show(
      state.preset
        ? preset(state.preset, sizes)
        : build(sizes, (q, k, b) => mask[b]?.[q]?.[k] ?? true),
      heads,
    );
  });
  form.addEventListener("change", keep);
  form.addEventListener("submit", (event) => event.preventDefault());
  text.addEventListener("input", fromText);
  text.addEventListener("change", keep);

  undo.addEventListener("click", goBack);
  addEventListener("keydown", (event) => {
    const asked = (event.ctrlKey || event.metaKey) && event.key === "z" && !event.shiftKey;
    if (!asked || event.target === text) return; // a text has an undo of its own
    event.preventDefault();
    goBack();
  });

  // A block that scrolls must be reachable by keyboard; one that does not is no tab stop.
  const watch = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const value = target.parentElement;
      if (value.scrollHeight > value.clientHeight) value.tabIndex = 0;
      else value.removeAttribute("tabindex");
    }
  });

  for (const card of cards) {
    watch.observe(card.querySelector(".mk-value > pre"));
    const button = card.querySelector("button");
    button.hidden = !navigator.clipboard; // only in a secure context
    button.ariaLabel = `Copy ${card.querySelector("h2").textContent}`;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(
        card.querySelector(".mk-value code").textContent,
      );
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
  }

  for (const control of [...presets, ...sliders, undo]) control.hidden = false;
  text.readOnly = false;
  show(read(text.value), sliders[3].valueAsNumber);
  addEventListener("hashchange", fromLink);
  fromLink();
  now ||= inText();
}
