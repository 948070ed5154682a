// Screenshot of one URL: node e2e/screenshot-url.mjs URL OUT.png [width] [height] [light|dark] [wait in ms]
import { chromium } from "playwright-core";
import { ARGUMENTS, EXECUTABLE } from "./browser.mjs";

const [url, out, width = "1280", height = "900", theme = "light", wait = "1500"] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath: EXECUTABLE, args: ARGUMENTS });
const page = await browser.newPage({ viewport: { width: Number(width), height: Number(height) }, colorScheme: theme });
page.on("console", (message) => console.log("console:", message.text()));
page.on("pageerror", (error) => console.log("error:", error.message));
await page.goto(url);
await page.waitForTimeout(Number(wait));
await page.screenshot({ path: out, fullPage: true });
await browser.close();
