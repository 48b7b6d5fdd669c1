#!/bin/bash
# The program's answers on three texts, compared with what they have to be.
cd "$(dirname "$0")" || exit 1
passed=1
for name in plain ties few; do
  diff <(python3 /app/wordcount.py "$name.txt" 2>&1) "$name.expected" || passed=0
done
echo "$passed" >/logs/verifier/reward.txt
