// Vite plugin: renders the TeX formulas to MathML at build time. Browsers render MathML natively, so KaTeX is not shipped.
import katex from "katex";
import { readFileSync } from "node:fs";
import type { Plugin } from "vite";

const MODULE_ID = "virtual:formulas";

export function formulas(): Plugin {
  return {
    name: "formulas",
    resolveId: (id) => (id === MODULE_ID ? `\0${MODULE_ID}` : undefined),
    load(id) {
      if (id !== `\0${MODULE_ID}`) return undefined;
      const table = JSON.parse(readFileSync(new URL("./src/formulas.json", import.meta.url), "utf8")) as Record<string, string>;
      const rendered = Object.entries(table).map(([name, tex]) => [name, renderMathml(tex)]);
      return `export default ${JSON.stringify(Object.fromEntries(rendered))}`;
    },
  };
}

function renderMathml(tex: string): string {
  const html = katex.renderToString(tex, { output: "mathml", displayMode: true, throwOnError: true, strict: "error" });
  const match = /<math[\s\S]*<\/math>/.exec(html);
  if (!match) throw new Error(`KaTeX rendered no MathML for ${tex}`);
  return match[0]
    .replace(/<annotation[\s\S]*?<\/annotation>/, "") // drop the TeX source, which screen readers would read too
    // Browsers stretch the parentheses of a matrix only with a mathematical font; a border has the right height with any font.
    .replace(/<mo fence="true">\(<\/mo><mtable([\s\S]*?<\/mtable>)<mo fence="true">\)<\/mo>/g, '<mtable class="parenthesized"$1');
}
