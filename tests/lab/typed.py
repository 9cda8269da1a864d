"""Which test types each of README's commands: test_newcomer.py, or another one.

tests/unit/test_documents.py holds README, and the tests that are named, against it.
"""

ANSIBLE = "ansible-playbook -i inventory/home"
CTRL_C = "\x03"

# What test_newcomer.py types, in README's order: what each says at its end, or, beside CTRL_C, when it is interrupted.
SAYS = {
    "git clone URL trainyard && cd trainyard": "",
    "make demo": "Run demo-.* finished",
    "cp -r inventory/examples/two-hosts inventory/home": "",
    "make venv": "",
    ". .venv/bin/activate": "",
    f"{ANSIBLE} site.yml": "Next",
    f"{ANSIBLE} playbooks/preflight.yml": "of 2 hosts",
    f"{ANSIBLE} train.yml -e run=first": ("step +[0-9]{2}", CTRL_C),
    f"{ANSIBLE} playbooks/status.yml": "first +running",
    f"{ANSIBLE} playbooks/logs.yml -e follow=true": ("node2/r1 [|](.|\\n)+Show what comes", CTRL_C),
    f"{ANSIBLE} playbooks/diagnose.yml": "The run goes on",
    "make dashboard INVENTORY=inventory/home": (r"http://127[.]0[.]0[.]1:\d+", CTRL_C),
    f"{ANSIBLE} playbooks/stop.yml -e run=first": "resume=true",
    # How the line of stop.yml goes on.
    f"{ANSIBLE} train.yml -e run=first -e resume=true": "Run first finished",
    f'{ANSIBLE} playbooks/generate.yml -e run=first -e prompt="She"': "She",
}

PLAYED = "tests/playbooks/test_train.py"
# What it does not type -> the test that does, with other values for what README calls DIR, FILE and the like.
ELSEWHERE = {
    f"{ANSIBLE} train.yml -e model=DIR -e run=first": f"{PLAYED}::test_a_model_and_a_file_of_ones_own",
    "make clean": "tests/playbooks/test_house_demo.py::test_make_demo_from_nothing",
    "-k -K": "tests/lab/test_newcomer.py::test_readme_alone",
    "--check --diff": "tests/lab/test_main_job.py::test_check_mode_runs_clean_on_untouched_hosts_and_changes_nothing",
    "-e config=FILE.yaml": f"{PLAYED}::test_a_model_and_a_file_of_ones_own",
    "-e plan=true": f"{PLAYED}::test_a_plan_of_all_hosts_says_what_a_run_takes_and_starts_nothing",
    "-e smoke=true": f"{PLAYED}::test_a_smoke_test_comes_first_and_leaves_nothing",
    "-e run=first -e rank=1 -e since=10m": f"{PLAYED}::test_a_run_from_its_start_to_its_results",
    "make lab HOSTS=3": "tests/lab/test_dashboard.py::test_two_commands_after_make_lab",
    "make lab-down": "tests/lab/test_dashboard.py::test_two_commands_after_make_lab",
    "make help": "tests/playbooks/test_house_demo.py::test_make_demo_from_nothing",
    "make docs-site": "tests/playbooks/test_docs_site.py::site",
    "ANSIBLE_STDOUT_CALLBACK=default": "tests/playbooks/test_live.py::test_ansibles_own_output_is_one_setting_away",
    "-e queue=true": "tests/lab/test_several.py::test_one_beside_another_and_one_that_waits",
    "make test": "tests/unit/test_house_runner.py::test_what_make_hands_on",
    "make lint": "tests/unit/test_house_runner.py::test_what_make_hands_on",
}
