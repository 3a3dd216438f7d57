#!/bin/sh
# Make single-board computers devices of a server, over ssh, one after another.
#
#   isthmus server token create fleet --name board --uses 50 --expires 7d > board.token
#   deploy/boards/enrol.sh server.example:9401 board.token isthmus.whl < hosts
#
# `hosts` has one ssh destination per line, whose user may use sudo. A board that has joined before
# keeps its identity; run it again for those that failed. The token is sent on standard input only.
set -eu
[ $# -eq 3 ] || { echo "usage: $0 HOST:PORT TOKEN_FILE WHEEL < hosts" >&2; exit 2; }
server=$1 token=$2 wheel=$3
unit=$(dirname "$0")/../systemd/isthmus-device.service
name=$(basename "$wheel")
failed=0
while read -r host; do
    [ -n "$host" ] || continue
    if scp -q "$wheel" "$unit" "$host:/tmp/" < /dev/null \
        && ssh "$host" "sudo sh -eu -c '
            id isthmus > /dev/null 2>&1 || useradd --system --home-dir /var/lib/isthmus isthmus
            install -d -m 0700 -o isthmus -g isthmus /var/lib/isthmus
            [ -x /opt/isthmus/bin/python ] || python3 -m venv /opt/isthmus
            /opt/isthmus/bin/pip install --quiet \"/tmp/$name[client]\"
            install -m 0644 /tmp/isthmus-device.service /etc/systemd/system/
            [ -e /var/lib/isthmus/device/member.json ] || runuser -u isthmus -- \
                /opt/isthmus/bin/isthmus client join $server --token-file - --state /var/lib/isthmus/device
            systemctl daemon-reload
            systemctl enable --quiet isthmus-device
            systemctl restart isthmus-device
        '" < "$token"; then
        echo "done    $host"
    else
        echo "failed  $host" >&2
        failed=$((failed + 1))
    fi
done
[ "$failed" -eq 0 ] || { echo "$failed boards failed; run it again for them" >&2; exit 1; }
