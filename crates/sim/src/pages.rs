//! A map by numbers that are given out one after the other and live for a while: a list of pages, each of which goes when all of it is gone. What is looked
//! for lies in one place, and what came together lies together, however many there are.

use std::marker::PhantomData;

/// What such a number is made of.
pub(crate) trait Number: Copy {
    fn number(self) -> usize;
    fn from_number(number: usize) -> Self;
}

impl Number for usize {
    fn number(self) -> usize {
        self
    }

    fn from_number(number: usize) -> Self {
        number
    }
}

/// Numbers of a page.
const PAGE: usize = 64;

struct Page<V> {
    num: usize,
    values: Vec<Option<V>>,
}

/// The map.
pub(crate) struct Pages<K, V> {
    pages: Vec<Option<Page<V>>>,
    num: usize,
    keys: PhantomData<K>,
}

impl<K, V> Default for Pages<K, V> {
    fn default() -> Self {
        Self { pages: Vec::new(), num: 0, keys: PhantomData }
    }
}

impl<K: Number, V> Pages<K, V> {
    pub(crate) fn insert(&mut self, key: K, value: V) {
        let (page, place) = (key.number() / PAGE, key.number() % PAGE);
        if self.pages.len() <= page {
            self.pages.resize_with(page + 1, || None);
        }
        let empty = || Page { num: 0, values: (0..PAGE).map(|_| None).collect() };
        let page = self.pages[page].get_or_insert_with(empty);
        if page.values[place].replace(value).is_none() {
            page.num += 1;
            self.num += 1;
        }
    }

    pub(crate) fn get(&self, key: K) -> Option<&V> {
        self.pages.get(key.number() / PAGE)?.as_ref()?.values[key.number() % PAGE].as_ref()
    }

    pub(crate) fn get_mut(&mut self, key: K) -> Option<&mut V> {
        self.pages.get_mut(key.number() / PAGE)?.as_mut()?.values[key.number() % PAGE].as_mut()
    }

    pub(crate) fn remove(&mut self, key: K) -> Option<V> {
        let slot = self.pages.get_mut(key.number() / PAGE)?;
        let page = slot.as_mut()?;
        let value = page.values[key.number() % PAGE].take()?;
        page.num -= 1;
        self.num -= 1;
        if page.num == 0 {
            *slot = None;
        }
        Some(value)
    }

    pub(crate) const fn len(&self) -> usize {
        self.num
    }

    /// All of them, by number.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (K, &V)> {
        let pages = self.pages.iter().enumerate().filter_map(|(nth, page)| Some((nth, page.as_ref()?)));
        pages.flat_map(|(nth, page)| {
            page.values
                .iter()
                .enumerate()
                .filter_map(move |(place, value)| Some((K::from_number(nth * PAGE + place), value.as_ref()?)))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::random::Random;

    #[test]
    fn it_is_a_map_and_keeps_no_page_of_what_is_gone() {
        let (mut pages, mut map, mut random) =
            (Pages::<usize, u64>::default(), BTreeMap::new(), Random::new(5));
        for n in 0..5_000 {
            pages.insert(n, n as u64);
            map.insert(n, n as u64);
            let old = n.saturating_sub(random.index(300));
            assert_eq!(pages.remove(old), map.remove(&old));
            if let Some(value) = pages.get_mut(n) {
                *value += 1;
            }
            map.entry(n).and_modify(|value| *value += 1);
            assert_eq!((pages.len(), pages.get(n)), (map.len(), map.get(&n)));
        }
        assert!(pages.iter().map(|(key, value)| (key, *value)).eq(map.clone()));
        map.into_keys().for_each(|key| assert!(pages.remove(key).is_some()));
        assert!(pages.pages.iter().all(Option::is_none));
    }
}
