#!/bin/bash
cd /app/conf.d || exit 1
sed -i 's/^workers = .*/workers = 8/' 10-base.conf
sed -i 's/^bind = .*/bind = 127.0.0.1:9000/' 20-network.conf
sed -i '/^workers = /d; s/^log_level = .*/log_level = warning/' 90-local.conf
