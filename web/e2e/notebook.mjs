// Notebook widget: queries travel as kernel messages, and the page does not affect the surrounding document.
import assert from "node:assert/strict";

export async function run(page, url, facts) {
  // A document of the same origin that embeds the widget.
  const body = `<!doctype html><html lang="en"><head><title>notebook</title></head><body><p id="around">around</p><div id="cell"></div></body></html>`;
  await page.route(`${url}notebook`, (route) => route.fulfill({ contentType: "text/html", body }));
  await page.goto(`${url}notebook`);
  await page.evaluate(
    async ({ url, fragment }) => {
      const { default: widget } = await import(`${url}page.js`);
      const callbacks = [];
      const controllers = new Map();
      const model = {
        get: () => fragment,
        on: (_, callback) => callbacks.push(callback),
        send: async ({ id, query, params, cancel }) => {
          if (cancel) return controllers.get(id)?.abort();
          controllers.set(id, new AbortController());
          try {
            const response = await fetch(`${url}api/query/${query}`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(params), signal: controllers.get(id).signal });
            const bytes = await response.arrayBuffer();
            const half = bytes.byteLength >> 1; // frames may be split at any byte
            for (const chunk of [bytes.slice(0, half), bytes.slice(half)]) callbacks.forEach((callback) => callback({ id }, [new DataView(chunk)]));
          } catch {
            // the query was canceled
          }
          callbacks.forEach((callback) => callback({ id, end: true }, []));
        },
      };
      window.unmountWidget = widget.render({ model, el: document.getElementById("cell") });
    },
    { url, fragment: `/trace?text=${encodeURIComponent(facts.text)}` },
  );
  const rows = page.getByRole("listbox", { name: "Residual stream from embedding to logits" }).getByRole("option");
  await page.getByText("logit lens unchanged from here").waitFor();
  assert.equal(await rows.count(), facts.points.length);
  const before = page.url();
  await page.getByRole("link", { name: "Attention" }).click();
  await page.getByRole("heading", { name: "Attention patterns of all heads" }).waitFor();
  await page.getByRole("navigation", { name: "Screens" }).getByRole("link", { name: "Trace" }).click();
  await rows.first().waitFor();
  assert.equal(page.url(), before);
  await page.keyboard.press("3"); // the notebook handles the keys
  assert.equal(await page.getByRole("navigation", { name: "Screens" }).getByRole("link", { name: "Trace" }).getAttribute("aria-current"), "page");
  await page.evaluate(() => window.unmountWidget());
  assert.equal(await page.locator("#cell").innerText(), "");
  assert.equal(await page.locator("#around").innerText(), "around");
}
