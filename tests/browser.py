"""A headless Chromium through its debugging pipe: open a page, ask it questions, see what it complains of."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Browser:
    def __init__(self, profile: Any) -> None:
        theirs_in, self.out = os.pipe()
        self.inp, theirs_out = os.pipe()
        flags = (
            f"--headless=new --no-sandbox --disable-gpu --remote-debugging-pipe --user-data-dir={profile} about:blank"
        )
        command = f"exec {CHROMIUM} {flags} 3<&{theirs_in} 4>&{theirs_out}"
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=(theirs_in, theirs_out), stdout=quiet, stderr=quiet
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.buffer, self.number, self.events = b"", 0, list[dict[str, Any]]()
        target = next(t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    session: str | None = None

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, address: str) -> None:
        self.events.clear()
        self.ask("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, script: str) -> Any:
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def complaints(self) -> list[dict[str, Any]]:
        """Console errors, exceptions and the browser's own log, with what a page was forbidden to do."""
        names = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [event for event in self.events if event.get("method") in names]

    def requests(self) -> list[str]:
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.out)
        os.close(self.inp)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            part = os.read(self.inp, 1 << 20)
            assert part, "the browser has ended"
            self.buffer += part
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)
