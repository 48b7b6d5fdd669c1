#!/bin/bash
# Half of the reward for one rotation, half for the special cases.
set -u
folder=$(mktemp -d)
score=0
show() { (cd "$folder" && for file in *; do printf '%s=%s\n' "$file" "$(cat "$file")"; done); }

echo new >"$folder/a.log" && echo old >"$folder/a.log.1"
[[ -x /app/rotate.sh ]] && /app/rotate.sh "$folder" 3
[[ $(show) == $'a.log=\na.log.1=new\na.log.2=old' ]] && score=0.5

rm -f "$folder"/*
echo 3 >"$folder/b c.log" && echo 2 >"$folder/b c.log.1" && echo 1 >"$folder/b c.log.2"
: >"$folder/empty.log" && echo kept >"$folder/empty.log.1" && echo other >"$folder/other.txt"
[[ -x /app/rotate.sh ]] && /app/rotate.sh "$folder" 2
wanted=$'b c.log=\nb c.log.1=3\nb c.log.2=2\nempty.log=\nempty.log.1=kept\nother.txt=other'
if [[ $score == 0.5 && $(show) == "$wanted" ]]; then score=1; fi
echo "$score" >/logs/verifier/reward.txt
