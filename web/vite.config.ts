import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";
import { formulas } from "./vite-plugin-formulas";

// Builds one script and one style sheet, because the page is also exported as a file and embedded in notebooks.
export default defineConfig({
  plugins: [svelte(), formulas()],
  base: "./",
  build: {
    outDir: "../src/cutaway/serve/static",
    emptyOutDir: true,
    target: "es2022",
    cssCodeSplit: false,
    modulePreload: false,
    assetsInlineLimit: 0,
    rollupOptions: {
      input: "src/main.ts",
      output: { format: "es", entryFileNames: "page.js", assetFileNames: "page[extname]", codeSplitting: false },
      preserveEntrySignatures: "strict",
    },
  },
});
