//! The gateways that `supervisor/README.md` shows really run.

use std::path::Path;
use std::process::{Command, Stdio};

use turnhost_tests::binary;

fn run(interpreter: &str, file: &str) {
    let known = Command::new(interpreter)
        .arg("--version")
        .stdout(Stdio::null())
        .status();
    if known.is_err() {
        eprintln!("skipped: there is no {interpreter} here");
        return;
    }
    let home = tempfile::tempdir().expect("a temporary folder");
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../supervisor/examples");
    let output = Command::new(interpreter)
        .arg(examples.join(file))
        .arg(binary::supervisor())
        .arg("--home")
        .arg(home.path())
        .arg("--")
        .arg(binary::turnhost())
        .output()
        .expect("it can be started");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "Hello, world\n");
}

#[test]
fn the_python_gateway_runs() {
    run("python3", "gateway.py");
}

#[test]
fn the_node_gateway_runs() {
    run("node", "gateway.mjs");
}

#[test]
fn the_readme_shows_the_gateways_that_run() {
    let supervisor = Path::new(env!("CARGO_MANIFEST_DIR")).join("../supervisor");
    let readme = std::fs::read_to_string(supervisor.join("README.md")).expect("the README");
    for file in ["gateway.py", "gateway.mjs"] {
        let code = std::fs::read_to_string(supervisor.join("examples").join(file));
        assert!(
            readme.contains(code.expect("an example").trim()),
            "{file} differs"
        );
    }
}
