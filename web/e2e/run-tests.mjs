// Run end-to-end tests of the page in Chromium: node e2e/run-tests.mjs URL FACTS.json NAME…
// Each NAME is a file in this folder that exports `run(page, url, facts)`. A test fails on requests to other origins, on page
// errors and on console errors that do not match the exported `expected`.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { chromium } from "playwright-core";
import { ARGUMENTS, EXECUTABLE } from "./browser.mjs";

const [url, path, ...names] = process.argv.slice(2);
const facts = JSON.parse(readFileSync(path, "utf8"));
const browser = await chromium.launch({ executablePath: EXECUTABLE, args: ARGUMENTS });
const origins = new Set([url, ...Object.values(facts.models ?? {}), ...(facts.thousand_url ? [facts.thousand_url] : [])].map((address) => new URL(address).origin));
let numFailed = 0;
for (const name of names) {
  const { run, options = {}, expected = /^$/ } = await import(`./${name}.mjs`);
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  const page = await context.newPage();
  const errors = [];
  page.on("pageerror", (error) => errors.push(`error: ${error.message}`));
  const aborted = new Set(); // by the page or by a navigation: on a busy machine more queries are superseded before their result
  page.on("requestfailed", (request) => request.failure()?.errorText === "net::ERR_ABORTED" && aborted.add(request.url()));
  page.on("console", (message) => {
    const resource = message.location().url;
    const isAborted = message.text().includes("net::ERR_") && aborted.has(resource);
    if (message.type() === "error" && !expected.test(message.text()) && !isAborted) errors.push(`console: ${message.text()} (${resource})`);
  });
  page.on("request", (request) => {
    const target = new URL(request.url());
    if (!["data:", "blob:", "about:", "file:"].includes(target.protocol) && !origins.has(target.origin)) errors.push(`request to ${target.origin}`);
  });
  page.setDefaultTimeout(240_000);
  try {
    await run(page, url, facts);
    assert.deepEqual(errors, []);
    console.log(`${name}: passed`);
  } catch (error) {
    numFailed += 1;
    console.log(`${name}: ${error.stack}\n${errors.join("\n")}`);
    if (process.env.SCREENSHOTS) await page.screenshot({ path: `${process.env.SCREENSHOTS}/failed-${name}.png`, fullPage: true });
  }
  await context.close();
}
await browser.close();
process.exit(numFailed ? 1 : 0);
