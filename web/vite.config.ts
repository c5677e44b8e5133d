import { defineConfig } from "vitest/config";

/** A `</script` or `<!--` in the bundle would end the script that a page carries inline. */
function refuseMarkup(code: string): void {
  if (/<\/script|<!--/i.test(code)) throw new Error("the bundle holds markup that ends an inline script");
}

export default defineConfig({
  build: {
    // `make web-check` builds elsewhere (--outDir), so that it can compare with the committed bundle.
    outDir: "../src/mainstem/report/bundle",
    emptyOutDir: true,
    target: "es2022",
    lib: { entry: "src/main.ts", formats: ["iife"], name: "mainstem", fileName: () => "mainstem.js", cssFileName: "mainstem" },
    modulePreload: false,
  },
  plugins: [
    {
      name: "safe-inline",
      generateBundle(_options, bundle) {
        for (const part of Object.values(bundle)) if (part.type === "chunk") refuseMarkup(part.code);
      },
    },
  ],
  test: { include: ["tests/**/*.test.ts"] },
});
