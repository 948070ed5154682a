// Render TeX to MathML for the documentation: reads JSON lines [tex, display], writes JSON lines.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const katex = createRequire(new URL("../web/package.json", import.meta.url))("katex");

function mathml(tex, displayMode) {
  const markup = katex.renderToString(tex, { output: "mathml", displayMode, throwOnError: true, strict: "error" });
  return /<math[\s\S]*<\/math>/.exec(markup)[0].replace(/<annotation[\s\S]*?<\/annotation>/, "");
}

for await (const line of createInterface({ input: process.stdin })) {
  const [tex, display] = JSON.parse(line);
  let result;
  try {
    result = { mathml: mathml(tex, display) };
  } catch (error) {
    result = { error: String(error.message) };
  }
  process.stdout.write(`${JSON.stringify(result)}\n`);
}
