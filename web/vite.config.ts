import { svelte, vitePreprocess } from "@sveltejs/vite-plugin-svelte";
import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { defineConfig, type Plugin } from "vite";

/** KaTeX lists every font three times; every browser that runs this page reads the first. */
const onlyWoff2: Plugin = {
  name: "only-woff2",
  enforce: "pre",
  transform(code, id) {
    if (!id.includes("katex") || !id.endsWith(".css")) return null;
    return code.replace(/,\s*url\([^)]*\.(?:woff|ttf)\)\s*format\(["'](?:woff|truetype)["']\)/g, "");
  },
};

/** Every file that the page is built from, in the order of their names. */
function sources(): string[] {
  const inside = ["src", "public"].flatMap((folder) =>
    readdirSync(folder, { recursive: true, withFileTypes: true })
      .filter((entry) => entry.isFile())
      .map((entry) => `${entry.parentPath}/${entry.name}`),
  );
  return [...inside, "index.html", "package.json", "vite.config.ts"].sort();
}

/** Says in the built page which source it was built from, so that a test without Node can tell whether it still is. */
const builtFrom: Plugin = {
  name: "built-from",
  generateBundle() {
    const hash = createHash("sha256");
    for (const file of sources()) hash.update(`${file}\n`).update(readFileSync(file));
    this.emitFile({ type: "asset", fileName: "built-from.txt", source: `${hash.digest("hex")}\n` });
  },
};

export default defineConfig({
  plugins: [onlyWoff2, builtFrom, svelte({ preprocess: vitePreprocess() })],
  base: "./",
  build: {
    outDir: "../src/cutaway/serve/static",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    reportCompressedSize: false,
    rolldownOptions: { checks: { pluginTimings: false } },
  },
  server: { proxy: { "/api": "http://127.0.0.1:8710" } },
});
