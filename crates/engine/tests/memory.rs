//! What a loaded engine takes: less than twice its model's file beside its arena, at its most while it loads. A process of its own, since
//! the system counts by process.
#![cfg(target_os = "linux")]

use baton_engine::{CpuEngine, CpuEngineConfig};
use baton_model::testing::model_path_or_skip;
use baton_model::{Model, ModelSource};

/// Bytes that the system has for this process under `field`.
fn own(field: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim().strip_suffix("kB").unwrap().trim().parse::<usize>().unwrap() * 1024
}

#[test]
fn loading_takes_less_than_twice_the_file_and_the_arena() {
    let Some(path) = model_path_or_skip("memory of the default model") else { return };
    let file = std::fs::metadata(&path).unwrap().len() as usize;
    let config = CpuEngineConfig { num_blocks: 300, ..CpuEngineConfig::default() };
    let model = Model::open(&ModelSource::File(path)).unwrap();
    let (engine, arena) = CpuEngine::new(&model, config).unwrap();
    let (peak, now) = (own("VmHWM:"), own("VmRSS:"));
    let bound = 2 * file + arena.num_bytes();
    eprintln!("file {file}, arena {}, at most {peak}, now {now}", arena.num_bytes());
    assert!(
        peak < bound,
        "{peak} bytes at most, with a file of {file} and an arena of {}",
        arena.num_bytes()
    );
    // All of it was touched, so the system's figure is no promise of memory to come.
    assert!(now > arena.num_bytes() + file * 9 / 10, "{now} bytes resident");
    drop((engine, model));
}
