"""A headless Chromium, told what to do over a pipe (its DevTools protocol): to see a page as a person would."""

import base64
import itertools
import json
import os
import shutil
import subprocess

import installed

# Texts that stand on others, or leave their card or the window (what is in a table may be scrolled to); plots with an
# axis of fewer than two figures, or of equal ones.
TEXTS = """
  (() => {
    const found = [], range = document.createRange();
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const node = walker.currentNode, parent = node.parentElement;
      if (!node.data.trim() || parent.closest('script, style')) continue;
      range.selectNodeContents(node);
      for (const box of range.getClientRects())
        if (box.width && box.height) found.push({ text: node.data.trim().slice(0, 40), box, parent });
    }
    const overlap = [], outside = [], slack = 1;
    const meet = (a, b) => a.left < b.right - slack && b.left < a.right - slack
      && a.top < b.bottom - slack && b.top < a.bottom - slack;
    found.forEach((one, n) => {
      for (const other of found.slice(n + 1)) if (meet(one.box, other.box)) overlap.push([one.text, other.text]);
      if (one.parent.closest('.wide')) return;
      const frame = (one.parent.closest('.card, .figure') || document.body).getBoundingClientRect();
      const left = Math.max(0, frame.left), right = Math.min(innerWidth, frame.right);
      if (one.box.left < left - slack || one.box.right > right + slack) outside.push(one.text);
    });
    const equal = [...document.querySelectorAll('.plot svg')].filter(svg => {
      const axes = [true, false].map(up => [...svg.querySelectorAll('text')]
        .filter(t => t.classList.contains(up ? 'y' : 'x')).map(t => t.textContent));
      return axes.some(texts => texts.length < 2 || new Set(texts).size < texts.length);
    }).map(svg => svg.getAttribute('aria-label'));
    const wide = Math.max(0, document.documentElement.scrollWidth - innerWidth);
    const plots = document.querySelectorAll('.plot svg').length;
    return { count: found.length, plots, overlap, outside, equal, wide };
  })()"""


def program():
    """The browser of this machine, or None."""
    return shutil.which("chromium") or shutil.which("google-chrome")


def have():
    """Skips, with the reason, where there is no browser; `make test` as root installs one."""
    if program() is None:
        installed.have("chromium", "chromium", "fonts-dejavu-core")


class Browser:
    """One page at a time. Use as a context."""

    def __init__(self, directory):
        self.errors = []  # what the page's console called an error or a warning, and exceptions
        self._numbers = itertools.count(1)
        self._session = None
        # The protocol wants them as descriptors 3 and 4.
        to_it, self._write = os.pipe()
        self._read, from_it = os.pipe()
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec "$@" 3<&{to_it} 4>&{from_it}',
                "bash",
                program(),
                "--headless",
                "--no-sandbox",  # the tests are root in a container
                "--disable-gpu",
                "--disable-dev-shm-usage",
                f"--user-data-dir={directory}",
                "--remote-debugging-pipe",
            ],
            pass_fds=(to_it, from_it),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_it)
        os.close(from_it)
        self._behind = [b""]  # what was read and is not yet whole

    def __enter__(self):
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        os.close(self._write)
        os.close(self._read)
        self._process.kill()
        self._process.wait()

    def ask(self, method, **parameters):
        """One call of the protocol, and its result."""
        number = next(self._numbers)
        call = {"id": number, "method": method, "params": parameters}
        if self._session:
            call["sessionId"] = self._session
        os.write(self._write, json.dumps(call).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self):
        while b"\0" not in self._behind[-1]:
            self._behind.append(os.read(self._read, 1 << 16))
            assert self._behind[-1], "the browser has ended"
        text, _, rest = b"".join(self._behind).partition(b"\0")
        self._behind = [rest]
        answer = json.loads(text)
        told = answer.get("params", {})
        if answer.get("method") == "Runtime.exceptionThrown":
            self.errors.append(told["exceptionDetails"]["exception"].get("description", "?"))
        if answer.get("method") == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
            self.errors.append(str(told["args"]))
        if answer.get("method") == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(told["entry"]["text"])
        return answer

    def open(self, url, width=1280, height=900, dark=False):
        """Show a page in a window of that size, and wait until it is drawn."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=url)
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression):
        """What an expression of JavaScript comes to, within the page."""
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def point(self, x, y, kind="mouseMoved", **more):
        """The mouse, in CSS pixels of the window."""
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def picture(self, path, whole=True):
        """The whole page as PNG, or what of it the window shows."""
        found = self.ask("Page.captureScreenshot", captureBeyondViewport=whole, format="png")
        path.write_bytes(base64.b64decode(found["data"]))
