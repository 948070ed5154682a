// Mathematics is turned into MathML while the page is built: the browser draws it by itself, and no script for it is sent.
import katex from "katex";
import { readFileSync } from "node:fs";
import type { Plugin } from "vite";

const NAME = "virtual:formulas";

export function formulas(): Plugin {
  return {
    name: "formulas",
    resolveId: (id) => (id === NAME ? `\0${NAME}` : undefined),
    load(id) {
      if (id !== `\0${NAME}`) return undefined;
      const table = JSON.parse(readFileSync(new URL("./src/formulas.json", import.meta.url), "utf8")) as Record<string, string>;
      const drawn = Object.entries(table).map(([name, tex]) => [name, mathml(tex)]);
      return `export default ${JSON.stringify(Object.fromEntries(drawn))}`;
    },
  };
}

function mathml(tex: string): string {
  const drawn = katex.renderToString(tex, { output: "mathml", displayMode: true, throwOnError: true, strict: "error" });
  const found = /<math[\s\S]*<\/math>/.exec(drawn);
  if (!found) throw new Error(`no MathML of ${tex}`);
  return found[0].replace(/<annotation[\s\S]*?<\/annotation>/, ""); // the source, which screen readers would read too
}
