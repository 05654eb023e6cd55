#!/usr/bin/env bash
# The page that ships is the page that is written: checks types and tests, builds it anew and compares byte for byte.
set -euo pipefail
cd "$(dirname "$0")"
npm install --no-package-lock --no-audit --no-fund --silent
npm run --silent check
npm test --silent
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT
npx vite build --outDir "$built" --emptyOutDir --logLevel warn
if ! diff -r "$built" ../src/cutaway/serve/static; then
  echo "src/cutaway/serve/static is not what web/ builds; run: cd web && npm run build" >&2
  exit 1
fi
size=$(find "$built" -type f ! -name '*.woff2' -exec gzip -9 -c {} \; | wc -c)
echo "the page is as built: $size bytes gzipped without fonts"
if [ "$size" -gt 400000 ]; then
  echo "that is over 400,000" >&2
  exit 1
fi
