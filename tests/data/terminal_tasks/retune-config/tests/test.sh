#!/bin/bash
# Settings are read by the same rule as the service has; every other line must be as it was.
passed=1
settings() { cat "$SERVICE_CONF"/*.conf | grep -v '^#' | grep "^$1 *=" | sed 's/^[^=]*= *//; s/ *$//'; }
for wanted in workers=8 log_level=warning bind=127.0.0.1:9000; do
  if [[ $(settings "${wanted%%=*}") != "${wanted#*=}" ]]; then
    echo "${wanted%%=*} is '$(settings "${wanted%%=*}")'"
    passed=0
  fi
done
others() { cat "$@" | grep -Ev '^(workers|log_level|bind) *=' | sort; }
diff <(others "$SERVICE_CONF"/*.conf) "$(dirname "$0")/others.expected" || passed=0
printf '{"reward": %s}\n' "$passed" >/logs/verifier/reward.json
