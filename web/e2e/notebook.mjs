// As notebooks show it: a kernel answers by messages, and what is around the page is left alone.
import assert from "node:assert/strict";

export async function run(page, url, facts) {
  // A document of this origin that is not the page.
  const body = `<!doctype html><html lang="en"><head><title>notebook</title></head><body><p id="around">around</p><div id="cell"></div></body></html>`;
  await page.route(`${url}notebook`, (route) => route.fulfill({ contentType: "text/html", body }));
  await page.goto(`${url}notebook`);
  await page.evaluate(
    async ({ url, fragment }) => {
      const { default: widget } = await import(`${url}page.js`);
      const heard = [];
      const stops = new Map();
      const model = {
        get: () => fragment,
        on: (_, callback) => heard.push(callback),
        send: async ({ id, query, params, cancel }) => {
          if (cancel) return stops.get(id)?.abort();
          stops.set(id, new AbortController());
          try {
            const answer = await fetch(`${url}api/query/${query}`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(params), signal: stops.get(id).signal });
            const bytes = await answer.arrayBuffer();
            const half = bytes.byteLength >> 1; // messages may be cut anywhere
            for (const piece of [bytes.slice(0, half), bytes.slice(half)]) heard.forEach((callback) => callback({ id }, [new DataView(piece)]));
          } catch {
            window.given_up = (window.given_up ?? 0) + 1;
          }
          heard.forEach((callback) => callback({ id, end: true }, []));
        },
      };
      window.leave = widget.render({ model, el: document.getElementById("cell") });
    },
    { url, fragment: `/trace?text=${encodeURIComponent(facts.text)}` },
  );
  const rows = page.getByRole("listbox", { name: "The stream from embedding to answer" }).getByRole("option");
  await page.getByText("prediction fixed here").waitFor();
  assert.equal(await rows.count(), facts.points.length);
  const before = page.url();
  await page.getByRole("link", { name: "Attention" }).click();
  await page.getByRole("heading", { name: "Where does each head look?" }).waitFor();
  await page.getByRole("link", { name: "Trace" }).click();
  await rows.first().waitFor();
  assert.equal(page.url(), before);
  await page.keyboard.press("3"); // keys are the notebook's
  assert.equal(await page.getByRole("link", { name: "Trace" }).getAttribute("aria-current"), "page");
  await page.evaluate(() => window.leave());
  assert.equal(await page.locator("#cell").innerText(), "");
  assert.equal(await page.locator("#around").innerText(), "around");
}
