//! What is committed of the compiled kernels: it belongs to the sources, keeps its budgets, and is what the toolchain makes.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use crate::library::cuda_folder;

fn built(name: &str) -> String {
    fs::read_to_string(cuda_folder().join("built").join(name)).unwrap()
}

/// SHA-256 of a file, by coreutils.
pub(crate) fn sha256(path: &std::path::Path) -> Option<String> {
    let output = Command::new("sha256sum").arg(path).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.split_whitespace().next().map(str::to_owned)
}

/// No toolchain is needed for this: sources that were changed and not compiled are noticed anywhere.
#[test]
fn the_committed_module_was_made_of_these_sources() {
    let sums = built("SHA256SUMS");
    let listed: BTreeMap<&str, &str> =
        sums.lines().filter_map(|line| line.split_once("  ")).map(|(sum, name)| (name, sum)).collect();
    let order = fs::read_to_string(cuda_folder().join("order")).unwrap();
    let sources = order.split_whitespace().map(|name| format!("kernels/{name}"));
    let files: Vec<String> = sources.chain(["order".to_owned(), "built/baton.fatbin".to_owned()]).collect();
    assert_eq!(listed.len(), files.len());
    let present = fs::read_dir(cuda_folder().join("kernels")).unwrap().count();
    assert_eq!(present, files.len() - 2, "every file in kernels/ is named in 'order'");
    for file in &files {
        let got = sha256(&cuda_folder().join(file)).expect("sha256sum");
        assert_eq!(listed.get(&**file), Some(&&*got), "{file} was changed: run crates/engine/cuda/build.py");
    }
    assert!(fs::metadata(cuda_folder().join("built/baton.fatbin")).unwrap().len() < 1 << 20);
}

/// What ptxas said when the module was made. A multiprocessor has 65,536 registers: they are for four blocks of decode, three of prefill with
/// small heads, two with heads of 96 and 128.
#[test]
fn no_kernel_spills_and_registers_stay_within_their_budgets() {
    let text = built("resources.txt");
    let mut kernels = 0;
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [name, _, "stack", stack, "spills", spills, "registers", registers] = words[..] else {
            panic!("not a line of resources: {line}");
        };
        let registers: u32 = registers.parse().unwrap();
        assert_eq!((stack, spills), ("0", "0"), "{line}");
        let large = ["_d96", "_d128"].iter().any(|size| name.ends_with(size));
        let budget = match name {
            _ if name.starts_with("attend_") && name.ends_with("_d256") => 255,
            _ if name.starts_with("attend_decode_") => 128,
            _ if name.starts_with("attend_prefill_") && large => 255,
            _ if name.starts_with("attend_prefill_") => 168,
            // Two blocks of it, with 128 sums a thread; four of the others.
            _ if name.starts_with("multiply_int8_") && name.ends_with("_m64") => 255,
            _ if name.starts_with("multiply_int8_") => 128,
            _ => 64,
        };
        assert!(registers <= budget, "{line}: the budget is {budget}");
        kernels += 1;
    }
    // 45 kernels for each of two architectures.
    assert_eq!(kernels, 2 * (2 * 5 + 2 * 2 * 6 + 2 * 3 + 5));
}

/// The toolchain's absence is no failure, in CI neither: it is 200 MB of wheels that nothing else needs.
#[test]
fn the_toolchain_makes_the_committed_module() {
    let Some(home) = std::env::var_os("CUDA_HOME") else {
        eprintln!("SKIPPED: CUDA_HOME names no toolchain, see crates/engine/cuda/build.py");
        return;
    };
    let output = Command::new("python3")
        .arg(cuda_folder().join("build.py"))
        .arg("--check")
        .arg(home)
        .output()
        .unwrap();
    let text =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success(), "{text}");
}
