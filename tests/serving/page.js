/* Runs a page's script over a document of stubs: reads the page and the answers by path as JSON from standard input,
   and after three polls writes what was asked for and what is shown. */
"use strict";
const { page, answers } = JSON.parse(require("fs").readFileSync(0, "utf8"));
const shown = {}, asked = [];
const stub = () => new Proxy(function () {}, {
  get: (target, name) => (name in target ? target[name] : (target[name] = name === Symbol.toPrimitive ? () => "" : stub())),
  apply: () => stub(),
});
const element = (hidden) => Object.assign(stub(), { hidden, textContent: "" });
const byId = (id) => (shown[id] ??= element(new RegExp(`id="${id}"[^>]* hidden`).test(page)));
let numPolls = 0;
const world = {
  document: Object.assign(stub(), { hidden: false, getElementById: byId }),
  localStorage: {}, matchMedia: () => ({ matches: false }), performance,
  fetch: async (path) => {
    asked.push(path);
    const [status, body] = answers[path.split("?")[0]];
    return { status, ok: status === 200, json: async () => body, text: async () => "" };
  },
  setTimeout: (poll) => {
    if (++numPolls < 3) return void setImmediate(poll);
    const texts = Object.fromEntries(Object.entries(shown).map(([id, one]) => [id, String(one.textContent)]));
    console.log(JSON.stringify({ asked, texts, closed: byId("closed").hidden }));
  },
};
const script = page.match(/<script>([^]*)<\/script>/)[1];
new Function(...Object.keys(world), script)(...Object.values(world));
