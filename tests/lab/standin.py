"""Programs that stand in for those which need a card."""

DCB = """#!/usr/bin/python3
# Stands in for iproute2's dcb: it notes what it is told, and answers by it as the kernel would.
import json, os, sys
state, words = os.environ["DCB_STATE"], sys.argv[2:]
known = json.load(open(state)) if os.path.exists(state) else {"app": {}, "pfc": [], "told": []}
known["told"].append(" ".join(words))
area, verb, _, interface, what = [*words, ""][:5]
if interface != "ens192":
    sys.exit("RTNETLINK answers: Operation not supported")
pairs = dict(word.split(":") for word in words[5:])
if (area, verb) == ("app", "replace"):
    known["app"].update(pairs)
elif (area, verb) == ("app", "del"):
    for mark in pairs:
        del known["app"][mark]
elif (area, verb) == ("pfc", "set"):
    known["pfc"] = [pairs.get(str(number), pairs["all"]) == "on" for number in range(8)]
elif area == "app":
    print(json.dumps({"dscp_prio": [[int(mark), int(one)] for mark, one in known["app"].items()]}))
elif area == "pfc":
    print(json.dumps({"pfc_cap": 8, "prio_pfc": known["pfc"] or [False] * 8}))
json.dump(known, open(state, "w"))
"""
