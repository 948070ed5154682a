// Tries the page in a real browser: node e2e/run-tests.mjs URL FACTS.json NAME…
// Each NAME is a file here with `run(page, url, facts)`. No request may leave the machine, and nothing may be an error
// but what the file exports as `expected`.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { chromium } from "playwright-core";
import { ARGUMENTS, EXECUTABLE } from "./browser.mjs";

const [url, path, ...names] = process.argv.slice(2);
const facts = JSON.parse(readFileSync(path, "utf8"));
const browser = await chromium.launch({ executablePath: EXECUTABLE, args: ARGUMENTS });
let failed = 0;
for (const name of names) {
  const { run, options = {}, expected = /^$/ } = await import(`./${name}.mjs`);
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  const page = await context.newPage();
  const wrong = [];
  page.on("pageerror", (error) => wrong.push(`error: ${error.message}`));
  const aborted = new Set(); // by the page or by a navigation: on a busy machine more queries are superseded before their result
  page.on("requestfailed", (request) => request.failure()?.errorText === "net::ERR_ABORTED" && aborted.add(request.url()));
  page.on("console", (message) => {
    const resource = message.location().url;
    const isAborted = message.text().includes("net::ERR_") && aborted.has(resource);
    if (message.type() === "error" && !expected.test(message.text()) && !isAborted) wrong.push(`console: ${message.text()} (${resource})`);
  });
  page.on("request", (request) => {
    const there = new URL(request.url());
    if (!["data:", "blob:", "about:", "file:"].includes(there.protocol) && there.origin !== new URL(url).origin) wrong.push(`a request to ${there.origin}`);
  });
  page.setDefaultTimeout(60_000);
  try {
    await run(page, url, facts);
    assert.deepEqual(wrong, []);
    console.log(`${name}: fine`);
  } catch (error) {
    failed += 1;
    console.log(`${name}: ${error.stack}\n${wrong.join("\n")}`);
    if (process.env.SHOTS) await page.screenshot({ path: `${process.env.SHOTS}/failed-${name}.png`, fullPage: true });
  }
  await context.close();
}
await browser.close();
process.exit(failed ? 1 : 0);
