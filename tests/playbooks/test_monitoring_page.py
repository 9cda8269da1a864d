"""The page of the role monitoring in a real browser, with a stand-in for Prometheus: what it says of the network."""

import contextlib
import http.server
import json
import os
import threading
import urllib.parse
from pathlib import Path

import browser as browsers
import pytest
import yard

PAGE = Path(__file__).resolve().parents[2] / "roles/monitoring/files/page.html"
ROCE = {"instance": "node2", "device": "mlx5_0", "port": "1"}
ROCE_NIC = {"instance": "node2", "device": "ens1np0"}
HOME_NIC = {"instance": "node1", "device": "eth0"}
# What a question is answered with that has this in it: [(labels, value), …].
HOME = {
    'up{job="host"}': [
        ({"instance": "node1", "cluster": "home"}, 1),
        ({"instance": "node2", "cluster": "home"}, 1),
    ],
    "node_network_up": [(HOME_NIC, 1), ({"instance": "node1", "device": "eth1"}, 0)],
    "node_network_speed_bytes": [(HOME_NIC, 125e6)],
    "rate(node_network_receive_bytes_total": [(HOME_NIC, 25e6)],
    "rate(node_network_transmit_bytes_total": [(HOME_NIC, 50e6)],
    "receive_drop_total": [(HOME_NIC, 0)],
    "(node_network_receive_errs_total": [(HOME_NIC, 0)],
    "carrier_changes": [(HOME_NIC, 0)],
}
FABRIC = {
    **HOME,
    "node_network_up": [*HOME["node_network_up"], (ROCE_NIC, 1)],
    "node_network_speed_bytes": [(HOME_NIC, 125e6), (ROCE_NIC, 12.5e9)],
    "receive_drop_total": [(HOME_NIC, 12.2), (ROCE_NIC, 0)],
    "carrier_changes": [(HOME_NIC, 4), (ROCE_NIC, 0)],
    "trainyard_nic_pause_total": [
        ({**ROCE_NIC, "direction": "rx"}, 340),
        ({**ROCE_NIC, "direction": "tx"}, 0),
    ],
    "trainyard_rdma_port_up": [
        ({**ROCE, "link": "Ethernet", "interface": "ens1np0"}, 1),
        ({**ROCE, "device": "mlx5_1", "link": "InfiniBand", "interface": ""}, 0),
    ],
    "node_infiniband_rate_bytes_per_second": [(ROCE, 12.5e9)],
    "port_data_received": [(ROCE, 3e9)],
    "port_data_transmitted": [(ROCE, 4e9)],
    '{counter=~"np_cnp_sent|cnpSent|tx_cnp_pkts"}': [(ROCE, 77)],
    'counter=~"np_cnp_sent|cnpSent|tx_cnp_pkts|rp_cnp_handled|cnpHandled|rx_cnp_pkts"': [
        ({**ROCE, "counter": "np_cnp_sent"}, 77)
    ],
    "out_of_": [(ROCE, 0)],
}
# Titles of plots that are there only where something is.
TROUBLE = (
    "Dropped or damaged",
    "Link: changes",
    "Pauses (PFC)",
    "Congestion notices",
    "RDMA packets lost",
)


class Prometheus(http.server.BaseHTTPRequestHandler):
    samples = HOME

    def do_GET(self):
        path = urllib.parse.urlparse(self.path)
        asked = dict(urllib.parse.parse_qsl(path.query))
        if path.path == "/user/":
            return self._send("text/html", PAGE.read_bytes())
        question = asked.get("query", "nothing")
        found = next((found for words, found in self.samples.items() if words in question), [])
        if path.path.endswith("alerts"):
            data = {"alerts": []}
        elif path.path.endswith("query_range"):
            times = range(int(asked["start"]), int(asked["end"]) + 1, int(asked["step"]))
            data = {"result": [{"metric": to, "values": [[x, str(y)] for x in times]} for to, y in found]}
        else:
            data = {"result": [{"metric": to, "value": [0, str(y)]} for to, y in found]}
        self._send("application/json", json.dumps({"status": "success", "data": data}).encode())

    def _send(self, kind, body):
        with contextlib.suppress(BrokenPipeError):  # the browser has gone on
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def page():
    """The page's address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Prometheus)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/user/"
    server.shutdown()
    server.server_close()


def test_of_the_network_is_shown_what_there_is(page, tmp_path, monkeypatch):
    browsers.have()
    with browsers.Browser(tmp_path / "profile") as browser:

        def shown(plots):
            """The page's text, a row of a table a line; once so many plots are there."""
            browser.open(page, width=1280)
            yard.wait_for(lambda: browser.value("document.querySelectorAll('.plot svg').length") == plots, 30)
            return browser.value("document.body.innerText")

        text = shown(2)
        assert "node1\teth0\t1 Gbit/s\t25 MB/s\t50 MB/s\t0\t0\t0" in text
        assert "eth1" not in text and "RDMA" not in text and "PFC" not in text
        assert not [title for title in TROUBLE if title in text]
        monkeypatch.setattr(Prometheus, "samples", FABRIC)
        text = shown(8)
        assert "node1\teth0\t1 Gbit/s\t25 MB/s\t50 MB/s\t12\t0\t4" in text
        assert "node2\tens1np0\t100 Gbit/s" in text and "340/s\t0/s" in text
        assert "node2\tmlx5_0\t100 Gbit/s\tEthernet, ens1np0\t3 GB/s\t4 GB/s\t77/s\t" in text
        assert "node2\tmlx5_1\tdown\tInfiniBand" in text
        assert [title for title in TROUBLE if title not in text] == ["RDMA packets lost"]
        assert "node2 ens1np0 is told" in text and "node2 ens1np0 tells others" not in text
        for width in (1280, 400):
            browser.open(page, width=width)
            yard.wait_for(lambda: browser.value("document.querySelectorAll('.plot svg').length") == 8, 30)
            seen = browser.value(browsers.TEXTS)
            assert seen["count"] > 100 and (seen["overlap"], seen["outside"], seen["wide"]) == ([], [], 0), (
                width
            )
        if picture := os.environ.get("TRAINYARD_SHOTS"):
            browser.picture(Path(picture) / "monitoring-network.png")
        assert browser.errors == []
