//! Faults planted in the kernels: each makes a check fail that the unchanged kernels pass.

use crate::attention::{Case, Kind, row};
use crate::element::Element;
use crate::int8;
use crate::library::{Build, Library, Patch, has_compiler};

/// Small, and yet of several steps, tiles and blocks.
fn case(kind: Kind) -> Case {
    let rows = match kind {
        Kind::Decode => vec![row(1, 200), row(2, 45)],
        Kind::Prefill => vec![row(40, 130)],
    };
    Case { element: Element::F16, head_dim: 32, num_heads: 2, num_kv_heads: 1, block_size: 16, rows }
}

/// What the patched kernels' first failed check says; `None` if they pass all of them.
fn failure(patches: &[Patch], kind: Kind) -> Option<String> {
    let build = Build { patches, attention: &[("f16", 32)], flags: &["-O0"] };
    let library = Library::open(&build.made());
    let case = case(kind);
    let laid = case.lay(1, 2);
    let checked = case.check(&library, kind, &laid);
    checked.and_then(|()| case.check_schedules(&library, kind, &laid)).err()
}

/// The same for products with 8-bit weights: several stretches and blocks of threads, the last of them ragged.
fn int8_failure(patches: &[Patch]) -> Option<String> {
    let library = Library::open(&Build { patches, attention: &[("f16", 32)], flags: &["-O0"] }.made());
    let case = int8::Case { element: Element::F16, rows: 18, outputs: 40, inputs: 4 * 128 + 88 };
    let laid = case.lay();
    let checked = case.check(&library, &laid, 0).map(drop);
    checked.and_then(|()| case.check_schedules(&library, &laid, 0)).err()
}

fn assert_found_in_products(from: &'static str, to: &'static str) {
    if !has_compiler() {
        return;
    }
    let found = int8_failure(&[Patch { file: "int8.cu", from, to }]);
    assert!(found.is_some(), "nobody noticed '{to}' in place of '{from}'");
    eprintln!("{}", found.unwrap_or_default());
}

fn assert_found(kind: Kind, file: &'static str, from: &'static str, to: &'static str) {
    if !has_compiler() {
        return;
    }
    let found = failure(&[Patch { file, from, to }], kind);
    assert!(found.is_some(), "nobody noticed '{to}' in place of '{from}'");
    eprintln!("{}", found.unwrap_or_default());
}

#[test]
fn without_a_fault_nothing_fails() {
    if std::env::var_os("BATON_KERNELS").is_none() && has_compiler() {
        for kind in [Kind::Decode, Kind::Prefill] {
            assert_eq!(failure(&[], kind), None);
        }
        assert_eq!(int8_failure(&[]), None);
    }
}

#[test]
fn swapped_keys_and_values_are_found() {
    let (from, to) = ("queries, mine, values, first", "queries, values, mine, first");
    assert_found(Kind::Decode, "decode.cu", from, to);
}

#[test]
fn a_missing_barrier_before_sums_are_merged_is_found() {
    assert_found(Kind::Decode, "decode.cu", "    sync_block();\n", "");
}

#[test]
fn a_missing_barrier_after_copies_arrive_is_found() {
    let from = "        sync_block();\n        attend_step";
    assert_found(Kind::Prefill, "prefill.cu", from, "        attend_step");
}

#[test]
fn a_missing_barrier_before_a_stage_is_copied_over_is_found() {
    let from = "takes its place.\n        sync_block();\n";
    assert_found(Kind::Prefill, "prefill.cu", from, "takes its place.\n");
}

#[test]
fn copies_that_nobody_waits_for_are_found() {
    assert_found(
        Kind::Prefill,
        "prefill.cu",
        "await_copies<1>();",
        "await_copies<2>();\n        if (step + 1 == num_steps) await_copies<0>();",
    );
}

#[test]
fn a_block_table_off_by_one_is_found() {
    assert_found(
        Kind::Decode,
        "attention.cu",
        "blocks[position >> shift]",
        "blocks[(position + 1) >> shift]",
    );
}

#[test]
fn a_query_that_sees_one_position_more_is_found() {
    assert_found(Kind::Prefill, "attention.cu", "position < limit[c / 2]", "position <= limit[c / 2]");
}

#[test]
fn memory_that_no_token_has_is_found_when_it_is_read() {
    assert_found(
        Kind::Decode,
        "attention.cu",
        "any = position < end;",
        "any = position < (end + 15) / 16 * 16;",
    );
}

#[test]
fn a_missing_barrier_before_a_stretch_is_copied_over_is_found() {
    let from = "copied over now.\n        sync_block();\n";
    assert_found_in_products(from, "copied over now.\n");
}

#[test]
fn a_missing_barrier_before_sums_take_the_place_of_stages_is_found() {
    let from = "takes the sums.\n    sync_block();\n";
    assert_found_in_products(from, "takes the sums.\n");
}

#[test]
fn a_scale_of_another_output_is_found() {
    assert_found_in_products("scales[output]", "scales[output > 0 ? output - 1 : 0]");
}

#[test]
fn halves_of_a_piece_that_change_places_are_found() {
    assert_found_in_products(
        "lane / 8 % 2 * 16 + warp_of() * PIECE;",
        "(1 - lane / 8 % 2) * 16 + warp_of() * PIECE;",
    );
}

#[test]
fn activations_read_beyond_their_row_are_found() {
    assert_found_in_products("k < static_cast<u32>(shape.inputs)", "k < static_cast<u32>(shape.stride)");
}
