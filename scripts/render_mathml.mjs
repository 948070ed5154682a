// Mathematics as MathML, for the documentation: one JSON line [tex, display] in, one JSON line out.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const katex = createRequire(new URL("../web/package.json", import.meta.url))("katex");

function mathml(tex, displayMode) {
  const drawn = katex.renderToString(tex, { output: "mathml", displayMode, throwOnError: true, strict: "error" });
  return /<math[\s\S]*<\/math>/.exec(drawn)[0].replace(/<annotation[\s\S]*?<\/annotation>/, "");
}

for await (const line of createInterface({ input: process.stdin })) {
  const [tex, display] = JSON.parse(line);
  let said;
  try {
    said = { mathml: mathml(tex, display) };
  } catch (error) {
    said = { error: String(error.message) };
  }
  process.stdout.write(`${JSON.stringify(said)}\n`);
}
