//! Who won, in sentences: against each colocated layout, and in all.

use super::outcome::{Colocated, Outcome, Slo};

/// What is not better or worse by more than this is alike: runs of one cluster differ by as much.
const ALIKE: f64 = 0.05;

/// One thing that is compared: its name, its value, and whether less of it is better.
struct Aspect {
    name: &'static str,
    value: fn(&Outcome) -> Option<f64>,
    less_is_better: bool,
    /// Whether somebody who reads a stream or waits for one would choose by it.
    decides: bool,
}

const ASPECTS: [Aspect; 5] = [
    Aspect { name: "worst gap", value: |o| o.itl_ms.map(|s| s.max), less_is_better: true, decides: true },
    Aspect { name: "p99 gap", value: |o| o.itl_ms.map(|s| s.p99), less_is_better: true, decides: true },
    Aspect { name: "median gap", value: |o| o.itl_ms.map(|s| s.p50), less_is_better: true, decides: false },
    Aspect { name: "median TTFT", value: |o| o.ttft_ms.map(|s| s.p50), less_is_better: true, decides: true },
    Aspect {
        name: "tokens/s",
        value: |o| Some(o.output_tokens_per_s),
        less_is_better: false,
        decides: false,
    },
];

/// How the disaggregated value stands to another: above 0 it is better.
fn better_by(aspect: &Aspect, ours: &Outcome, theirs: &Outcome) -> Option<f64> {
    let (ours, theirs) = ((aspect.value)(ours)?, (aspect.value)(theirs)?);
    if ours <= 0.0 || theirs <= 0.0 {
        return None;
    }
    Some(if aspect.less_is_better { theirs / ours } else { ours / theirs } - 1.0)
}

/// One sentence for each colocated cluster, and one in all.
pub(super) fn sentences(ours: &Outcome, colocated: &[Colocated], slo: Slo) -> Vec<String> {
    let mut all: Vec<String> = colocated.iter().map(|one| against(ours, one)).collect();
    all.push(in_all(ours, colocated));
    if slo.ttft_ms.is_some() || slo.itl_ms.is_some() {
        all.extend(by_goodput(ours, colocated));
    }
    all
}

fn against(ours: &Outcome, one: &Colocated) -> String {
    let parts: Vec<String> = ASPECTS
        .iter()
        .filter_map(|aspect| {
            let (mine, other) = ((aspect.value)(ours)?, (aspect.value)(&one.outcome)?);
            let by = better_by(aspect, ours, &one.outcome)?;
            let word = match by {
                by if by > ALIKE => "better",
                by if by < 1.0 / (1.0 + ALIKE) - 1.0 => "worse",
                _ => "alike",
            };
            Some(format!("{} {mine:.2} against {other:.2} ({word})", aspect.name))
        })
        .collect();
    format!("disaggregated against {}: {}", one.name(), parts.join(", "))
}

/// Disaggregation loses when a colocated cluster is as good or better in everything that decides.
fn in_all(ours: &Outcome, colocated: &[Colocated]) -> String {
    let ahead = |one: &Colocated| {
        let decisive = ASPECTS.iter().filter(|aspect| aspect.decides);
        decisive.filter_map(|aspect| better_by(aspect, ours, &one.outcome)).any(|by| by > ALIKE)
    };
    let lost: Vec<String> = colocated.iter().filter(|one| !ahead(one)).map(Colocated::name).collect();
    if lost.is_empty() {
        "Disaggregation wins here: no colocated cluster is as good in worst gap, p99 gap and TTFT together."
            .to_owned()
    } else {
        format!(
            "Disaggregation loses here: {} {} as good or better in worst gap, p99 gap and TTFT.",
            lost.join(" and "),
            if lost.len() == 1 { "is" } else { "are" }
        )
    }
}

fn by_goodput(ours: &Outcome, colocated: &[Colocated]) -> Option<String> {
    let best = colocated.iter().max_by(|a, b| a.outcome.goodput_per_s.total_cmp(&b.outcome.goodput_per_s))?;
    let (mine, other) = (ours.goodput_per_s, best.outcome.goodput_per_s);
    let verb = match () {
        () if mine > other * (1.0 + ALIKE) => "wins",
        () if other > mine * (1.0 + ALIKE) => "loses",
        () => "is alike",
    };
    Some(format!(
        "Under these SLOs disaggregation {verb}: {mine:.3} requests/s keep to them, {other:.3} with {}.",
        best.name()
    ))
}

#[cfg(test)]
mod tests {
    use super::super::layout::Split;
    use super::super::report::tests::{colocated, comparison, outcome};
    use super::*;

    #[test]
    fn a_win_names_what_it_costs() {
        let sentences = comparison().verdict;
        assert_eq!(sentences.len(), 3, "{sentences:?}");
        assert!(sentences[0].contains("worst gap 47.00 against 2734.00 (better)"), "{sentences:?}");
        assert!(sentences[0].contains("p99 gap 24.00 against 19.00 (worse)"), "{sentences:?}");
        assert!(sentences[1].contains("median TTFT 2960.00 against 2830.00 (alike)"), "{sentences:?}");
        assert!(sentences[2].contains("wins here"), "{sentences:?}");
    }

    #[test]
    fn a_loss_is_said() {
        // Light load, short prompts: nothing stalls, and both cores decode.
        let ours = outcome([15.0, 20.0, 30.0], 60.0, 1.0);
        let light = colocated(Split::OneByTwo, None, outcome([8.0, 11.0, 30.5], 40.0, 2.0));
        let slow = colocated(Split::TwoByOne, None, outcome([8.0, 11.0, 300.0], 40.0, 1.0));
        let all = sentences(&ours, &[slow.clone(), light.clone()], Slo::default());
        let last = all.last().unwrap();
        assert!(last.contains("loses here: 1x2, in one piece is as good"), "{all:?}");
        assert!(!last.contains("2x1"), "{all:?}");
        let slo = Slo { ttft_ms: None, itl_ms: Some(50.0) };
        let all = sentences(&ours, &[slow, light], slo);
        assert!(all.last().unwrap().contains("disaggregation loses: 1.000"), "{all:?}");
        assert!(all.last().unwrap().contains("2.000 with 1x2"), "{all:?}");
    }
}
