import { svelte, vitePreprocess } from "@sveltejs/vite-plugin-svelte";
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

export default defineConfig({
  plugins: [onlyWoff2, svelte({ preprocess: vitePreprocess() })],
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
