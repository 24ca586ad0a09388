//! Who waits for whom over blocks, kept as it changes, so that what a look at it costs does not grow with the cluster.
//!
//! A handoff that waits for blocks of one worker waits for those who hold some there. If it holds blocks of another worker itself, that worker's blocks are not
//! back before the first one's are. So these pairs of workers are the graph's edges, with handoffs that hold nothing, or wait for nothing, left out: no
//! cycle goes through them.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use baton_handoff::HandoffKey;

use crate::ids::IdHasher;

/// From a worker whose blocks a handoff holds to one whose blocks it waits for: the blocks of the second must come back before those of the first do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Edge {
    at: usize,
    on: usize,
}

/// Where a handoff has legs that hold blocks or wait for some.
#[derive(Debug, Default)]
struct Places {
    holds: Vec<usize>,
    waits: Vec<usize>,
}

impl Places {
    fn edges(&self) -> impl Iterator<Item = Edge> {
        let pairs = self.holds.iter().flat_map(|at| self.waits.iter().map(|on| Edge { at: *at, on: *on }));
        pairs.filter(|edge| edge.at != edge.on)
    }
}

fn set(list: &mut Vec<usize>, worker: usize, is_there: bool) {
    list.retain(|other| *other != worker);
    if is_there {
        list.push(worker);
    }
}

/// The graph.
#[derive(Debug, Default)]
pub(crate) struct WaitGraph {
    handoffs: HashMap<HandoffKey, Places, BuildHasherDefault<IdHasher>>,
    /// By the worker that an edge begins at: where it leads, once for each handoff.
    edges: Vec<Vec<usize>>,
    /// Edges that came since the graph was looked at.
    new: Vec<Edge>,
}

impl WaitGraph {
    /// A leg on this worker came, moved on or went: whether it holds blocks there now, and whether it waits for some.
    pub(crate) fn note(&mut self, key: HandoffKey, worker: usize, (holds, waits): (bool, bool)) {
        let Self { handoffs, edges, new } = self;
        let places = handoffs.entry(key).or_default();
        places.edges().for_each(|edge| remove(edges, edge));
        set(&mut places.holds, worker, holds);
        set(&mut places.waits, worker, waits);
        for edge in places.edges() {
            if edges.len() <= edge.at {
                edges.resize(edge.at + 1, Vec::new());
            }
            edges[edge.at].push(edge.on);
            new.push(edge);
        }
        if places.holds.is_empty() && places.waits.is_empty() {
            handoffs.remove(&key);
        }
    }

    /// The process is gone, and with it every leg that was there.
    pub(crate) fn forget(&mut self, worker: usize) {
        let is_there = |places: &Places| places.holds.contains(&worker) || places.waits.contains(&worker);
        let there = self.handoffs.iter().filter(|(_, places)| is_there(places));
        let keys: Vec<HandoffKey> = there.map(|(key, _)| *key).collect();
        for key in keys {
            self.note(key, worker, (false, false));
        }
    }

    /// A cycle, as the workers along it. Of a graph that had none only what came since can have closed one.
    pub(crate) fn cycle(&mut self) -> Option<Vec<usize>> {
        let mut new = std::mem::take(&mut self.new);
        let found = new.drain(..).find_map(|edge| self.cycle_through(edge));
        self.new = new;
        found
    }

    fn cycle_through(&self, edge: Edge) -> Option<Vec<usize>> {
        let next = |worker: usize| self.edges.get(worker).map_or(&[][..], Vec::as_slice);
        // It may be gone again.
        if !next(edge.at).contains(&edge.on) {
            return None;
        }
        // Depth first from its end, in search of its beginning.
        let (mut path, mut seen) = (vec![(edge.on, 0)], vec![edge.on]);
        while let Some((worker, nth)) = path.last_mut() {
            let Some(&to) = next(*worker).get(*nth) else {
                path.pop();
                continue;
            };
            *nth += 1;
            if to == edge.at {
                return Some(
                    std::iter::once(edge.at).chain(path.iter().map(|(worker, _)| *worker)).collect(),
                );
            }
            if !seen.contains(&to) {
                seen.push(to);
                path.push((to, 0));
            }
        }
        None
    }

    /// What it knows of a worker's legs, to be compared with them.
    pub(crate) fn knows(&self, key: HandoffKey, worker: usize) -> (bool, bool) {
        let places = self.handoffs.get(&key);
        places
            .map_or((false, false), |places| (places.holds.contains(&worker), places.waits.contains(&worker)))
    }

    /// Whether nothing holds or waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.handoffs.is_empty()
    }
}

fn remove(edges: &mut [Vec<usize>], edge: Edge) {
    if let Some(from) = edges.get_mut(edge.at)
        && let Some(nth) = from.iter().position(|on| *on == edge.on)
    {
        from.swap_remove(nth);
    }
}

#[cfg(test)]
mod tests {
    use baton_handoff::RequestId;

    use super::*;
    use crate::random::Random;

    fn key(n: u8) -> HandoffKey {
        HandoffKey { request: RequestId([n; 16]), group: 0, attempt: 0 }
    }

    /// Handoffs by number: holds at the first worker, waits on the second.
    fn graph(edges: &[(usize, usize)]) -> WaitGraph {
        let mut graph = WaitGraph::default();
        for (n, (at, on)) in edges.iter().enumerate() {
            graph.note(key(n as u8), *at, (true, false));
            graph.note(key(n as u8), *on, (false, true));
        }
        graph
    }

    /// Workers 0 and 1 prefill, 2 and 3 decode.
    #[test]
    fn waiting_in_one_order_is_no_cycle_and_in_both_is_one() {
        let cycle = |edges: &[(usize, usize)]| graph(edges).cycle();
        // Decode's blocks first, then prefill's: whoever waits on a prefill worker holds blocks of a decode worker.
        assert_eq!(cycle(&[(2, 0), (3, 0), (2, 1)]), None);
        // One that computed before it was granted waits for blocks whose holder waits for its own.
        assert!(cycle(&[(2, 0), (0, 2)]).is_some());
        assert_eq!(cycle(&[(2, 0), (0, 3)]), None);
        // The same over two of each kind, with others that wait for them and are on no cycle themselves.
        let around = cycle(&[(2, 0), (0, 3), (3, 1), (1, 2)]).unwrap();
        assert_eq!(around.len(), 4, "{around:?}");
        assert!(cycle(&[(9, 2), (2, 0), (0, 3), (3, 1), (1, 2), (1, 8)]).is_some());
        assert_eq!(cycle(&[(9, 2), (2, 0), (0, 3), (3, 1), (1, 8)]), None);
    }

    #[test]
    fn what_went_closes_no_cycle_and_a_leg_that_holds_and_waits_at_one_place_is_none() {
        let mut graph = graph(&[(2, 0), (0, 2)]);
        graph.note(key(1), 2, (false, false));
        assert_eq!(graph.cycle(), None);
        graph.note(key(1), 0, (true, true));
        assert_eq!(graph.cycle(), None);
        graph.note(key(0), 0, (false, false));
        graph.forget(0);
        graph.forget(2);
        assert!(graph.is_empty() && graph.edges.iter().all(Vec::is_empty), "{graph:?}");
    }

    /// Beside a search of the whole graph from scratch, over random changes.
    #[test]
    fn cycles_are_found_when_they_close() {
        let mut random = Random::new(3);
        let mut num_cycles = 0;
        for _ in 0..2_000 {
            let (mut graph, mut legs) = (WaitGraph::default(), HashMap::new());
            for _ in 0..60 {
                let (handoff, worker) = (random.index(6) as u8, random.index(5));
                let state = [(false, false), (true, false), (false, true)][random.index(3)];
                graph.note(key(handoff), worker, state);
                legs.insert((handoff, worker), state);
                let found = graph.cycle().is_some();
                assert_eq!(found, has_cycle(&legs), "{legs:?}");
                if found {
                    num_cycles += 1;
                    break;
                }
            }
        }
        assert!(num_cycles > 100, "{num_cycles}");
    }

    fn has_cycle(legs: &HashMap<(u8, usize), (bool, bool)>) -> bool {
        let pairs = legs.iter().flat_map(|((a, at), (holds, _))| {
            let waits =
                legs.iter().filter(move |((b, on), (_, waits))| *holds && *waits && a == b && at != on);
            waits.map(|((_, on), _)| (*at, *on))
        });
        let mut left: Vec<(usize, usize)> = pairs.collect();
        // Whoever waits for nobody comes back; what waits for that one only does so next.
        loop {
            let before = left.len();
            let waiting: Vec<usize> = left.iter().map(|(a, _)| *a).collect();
            left.retain(|(_, b)| waiting.contains(b));
            if left.len() == before {
                return !left.is_empty();
            }
        }
    }
}
