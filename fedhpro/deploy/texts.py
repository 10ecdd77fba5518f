"""What a deployment folder tells people and machines: scripts, systemd units, READMEs. $names are filled in."""

from __future__ import annotations

from string import Template

ENVIRONMENT = """\
umask 077
export FLWR_HOME="@PWD/flwr" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
mkdir -p "@FLWR_HOME"
"""

SERVER_CONF = """\
# Where the SuperLink listens. What is set in the environment wins.
: "@{BIND:=$bind}"
: "@{PORT:=$port}"
"""

SERVER_START = """\
#!/usr/bin/env bash
# Starts the SuperLink behind its gate; settings are in server.conf, the state in state.db. fedhpro must be on the PATH.
set -euo pipefail
cd "@(dirname "@{BASH_SOURCE[0]}")"
. ./server.conf
${environment}\
exec fedhpro deploy serve . --host "@BIND" --port "@PORT"
"""

INSECURE_SERVER_START = """\
#!/usr/bin/env bash
# Starts a SuperLink WITHOUT TLS, without authentication: whoever reaches the port runs code on every node.
set -euo pipefail
cd "@(dirname "@{BASH_SOURCE[0]}")"
. ./server.conf
${environment}\
exec flower-superlink --insecure --host "@BIND" --port "@PORT" --database state.db
"""

SITE_CONF = """\
# The settings of this site. What is set in the environment wins.
# The operator's server:
: "@{SUPERLINK:=$address}"
# The data of this site, which never leaves it: folder:/path, csv:/path or python:module:function.
# Empty: this node's share of the public data that the federation's config names (a rehearsal on one machine).
: "@{DATA:=}"
# Keys that the operator's config must have, or this site does not take part; for instance
# "privacy=local noise=40 epsilon=8", "secure=true evaluation=off", or a method: "method=fedavg". Empty: whatever the
# operator signs.
: "@{REQUIRE:=}"
# What this node remembers between rounds and restarts:
: "@{MEMORY:=@PWD/memory}"
# A port of this machine (loopback only) between the SuperNode and the training process:
: "@{RUNTIME_PORT:=$runtime_port}"
"""

SITE_START = """\
#!/usr/bin/env bash
# Starts the SuperNode of $name; settings are in site.conf. fedhpro must be on the PATH.
set -euo pipefail
cd "@(dirname "@{BASH_SOURCE[0]}")"
. ./site.conf
${environment}\
exec fedhpro deploy node . --superlink "@SUPERLINK" --partition $partition --data "@DATA" --memory "@MEMORY" \\
  --port "@RUNTIME_PORT" --require "@REQUIRE"$insecure
"""

UNIT = """\
# systemd: put this folder at $place, owned by the user fedhpro, then
#   sudo cp $place/$unit /etc/systemd/system/ && sudo systemctl enable --now $unit
[Unit]
Description=$what
After=network-online.target
Wants=network-online.target

[Service]
User=fedhpro
# where fedhpro and flwr are installed:
Environment=PATH=/opt/fedhpro/venv/bin:/usr/bin:/bin
ExecStart=$place/start.sh
Restart=always
RestartSec=10
UMask=0077
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ReadWritePaths=$place

[Install]
WantedBy=multi-user.target
"""

OPERATOR_README = """\
# A federation of $count nodes

Made by `fedhpro deploy init`. Everything here is yours, the operator's; each site gets its own folder and nothing
else.

| folder | what is in it | who needs it |
| --- | --- | --- |
| `ca/` | the key that certificates are signed with | you alone; best kept offline |
| `operator/` | your client certificate, your key that signs apps | you alone |
| `server/` | the SuperLink: its certificate, start script, systemd unit, state | the server's machine |
| `sites/node-K/` | a node's key, the CA's certificate, your public signing key, start script | site K alone |
| `app/` | the program that runs on the sites; nothing secret | everybody may read it |

$security

## From here to a trained model

1. On the server's machine (this one, if the folder is here): `server/start.sh`, or its systemd unit.
2. `fedhpro deploy register FOLDER` tells the server which nodes there are.
3. Send each site its folder over a safe channel: `tar -C sites -czf node-1.tar.gz node-1`. Its README says what to
   do.
4. `fedhpro deploy status FOLDER --watch` shows the nodes as they come.
5. `fedhpro deploy audit FOLDER` prints exactly which tensors will leave a site. Show it to the sites.
6. `fedhpro deploy run FOLDER --follow` signs the app, starts it, and shows its log. `deploy stop FOLDER RUN` stops
   it.

## Later

- **Certificates expire** (`fedhpro deploy status FOLDER` shows when). `fedhpro deploy renew FOLDER` makes new ones
  for the server and for you; copy `server/server.crt`, `server/server.key` and `server/operator.crt` to the server
  if it is another machine. A running server takes them up by itself, the old operator certificate is refused from
  then on, and the sites need nothing. The CA lives ten years; after that make a new folder.
- **A site's key is lost or stolen:** `fedhpro deploy revoke FOLDER node-K` shuts that key out at once and for good.
  Where the server is another machine and cannot be reached, copy `server/revoked.json` there.
- **One more site:** `fedhpro deploy add FOLDER`, then `fedhpro deploy register FOLDER`. A site whose key was
  revoked comes back so. A run that goes on knows only the nodes of its start: stop it and `deploy run FOLDER --resume`.
- **Your signing key (`operator/signer`) is stolen:** the sites must get a new `trusted.yaml`; make a new folder.
- **Your laptop is stolen:** `fedhpro deploy renew FOLDER` from a backup, copy `server/operator.crt` to the server, and
  see the line above: the signing key was on it.
"""

SECURE = """\
## What is protected, and how

- The connection: TLS with this folder's own CA. Server names in the certificate: $hosts.
- Who trains: only nodes whose key you registered. The server refuses every other key, and revoked ones.
- Who commands: submitting, registering and listing need your client certificate. A site has none.
- What runs on the sites: nodes start only apps that carry your signature (`operator/signer`), even if the server
  was broken into. The signature covers the program, not the tensors and settings that the server sends to it.
- Not protected: whoever is root on a machine. And tensors can tell about the data that they were trained on: see
  `deploy audit`."""

INSECURE = """\
## NOT PROTECTED

This folder was made with `--insecure`: no TLS, no keys, no signatures. Whoever reaches the server's port can read
everything and run code on every node. It is for trying things out on one machine."""

SITE_README = """\
# $name of a federation

This folder is yours alone: it holds your node's private key. Do not send it on. What is in it:

- `site.conf`: your settings. `start.sh`: starts the node. `$unit`: the same as a systemd service.
$contents
## Start

1. Python 3.11 or newer: `python3 -m venv venv && venv/bin/pip install "./FILE.whl[flower]"`,
   where FILE.whl is the package fedhpro that your operator gave you (`pip wheel --no-deps .` in its sources makes it);
   then `export PATH="@PWD/venv/bin:@PATH"`.
2. Say where your data is, in `site.conf`: a folder with one sub-folder per class (`folder:/data/images`), a table
   (`csv:/data/samples.csv`), or a function of your own (`python:module:function`).
3. `./start.sh`. The node connects outwards to $address; nobody connects to you: no port has to be opened. It waits
   where the server is away or does not know its key yet, and says so. After an upgrade of fedhpro, start it again.

## What leaves this machine

Tensors only, never samples: model weights, and what the method asks of a client besides, with counts of samples. That
is class-wise statistics, or with the default method a vote: whether this site's classes are mixed. Which tensors
exactly, with shapes and bytes, the operator can show you: `fedhpro deploy audit`. Test accuracies are computed here, on
samples that you hold out.
$trust
If this key is lost or stolen, tell the operator, who shuts it out with one command and sends you a new folder.
"""

SITE_CONTENTS = """\
- `node.key`, `node.pub`: your node's key. The operator has registered the public half.
- `ca.crt`: with it your node recognises the server. `runtime.secret`: with it your own processes recognise each other.
- `trusted.yaml`: the operator's public signing key.
"""

SITE_TRUST = """
Your node runs only programs that the operator signed (`trusted.yaml`); other code is refused, whoever sends it. You
can read the program before: ask the operator for the `app/` folder. Node and training process run as the user who
starts `start.sh`: give that user access to this data and to nothing else.
"""


def fill(text: str, **values: object) -> str:
    """$name is filled in; @ stands for the shell's own $."""
    return Template(text).substitute({name: str(value) for name, value in values.items()}).replace("@", "$")
