#!/bin/bash
cat >/app/rotate.sh <<'END'
#!/bin/bash
folder=$1 n=$2
for log in "$folder"/*.log; do
  [[ -s $log ]] || continue
  for ((i = n; i > 1; i--)); do
    [[ -e $log.$((i - 1)) ]] && mv -f "$log.$((i - 1))" "$log.$i"
  done
  mv -f "$log" "$log.1"
  : >"$log"
done
END
chmod +x /app/rotate.sh
