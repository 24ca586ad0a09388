//! The golden prompts, and what it means to match them.

use serde::Deserialize;

/// Below this margin between the best two logits two correct f32 implementations may part.
pub const MARGIN: f64 = 0.005;

/// A prompt with what the reference implementation made of it.
#[derive(Debug, Clone, Deserialize)]
pub struct Golden {
    /// What it is called.
    pub name: String,
    /// Its text; absent when only token ids were given.
    pub prompt: Option<String>,
    /// Its token ids.
    pub prompt_tokens: Vec<u32>,
    /// The most probable token at each step, end-of-sequence ignored.
    pub greedy_tokens: Vec<u32>,
    /// Distance of the best two logits at each step.
    pub top2_margins: Vec<f64>,
    /// What the greedy tokens say.
    pub text: String,
}

#[derive(Deserialize)]
struct File {
    prompts: Vec<Golden>,
}

/// All 12.
///
/// # Panics
/// When the file can't be read.
pub fn all() -> Vec<Golden> {
    let path = crate::repository().join("tests/golden/smollm2-135m-q4_1.json");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let file: File =
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert_eq!(file.prompts.len(), 12);
    file.prompts
}

/// One by its name.
///
/// # Panics
/// When there is none.
pub fn named(name: &str) -> Golden {
    all()
        .into_iter()
        .find(|golden| golden.name == name)
        .unwrap_or_else(|| panic!("no golden prompt '{name}'"))
}

impl Golden {
    /// Demands the golden tokens of `generate(prompt, num_tokens)`: exactly wherever the margin is [`MARGIN`] or more. Where it is
    /// below, the other of the two best tokens may come; the golden one is then forced and the rest compared again.
    /// Returns how many tokens had to be forced.
    ///
    /// # Panics
    /// At the first token that differs.
    pub async fn check(&self, mut generate: impl AsyncFnMut(&[u32], usize) -> Vec<u32>) -> usize {
        let wanted = &self.greedy_tokens;
        let mut prompt = self.prompt_tokens.clone();
        let (mut done, mut num_forced) = (0, 0);
        while done < wanted.len() {
            let got = generate(&prompt, wanted.len() - done).await;
            assert_eq!(got.len(), wanted.len() - done, "{}: tokens asked for and given", self.name);
            let Some(equal) = got.iter().zip(&wanted[done..]).position(|(got, wanted)| got != wanted) else {
                break;
            };
            let at = done + equal;
            assert!(
                self.top2_margins[at] < MARGIN,
                "{}: token {at} is {}, golden is {}, at a margin of {}; prefix {:?}",
                self.name,
                got[equal],
                wanted[at],
                self.top2_margins[at],
                &wanted[..at]
            );
            prompt.extend(&wanted[done..=at]);
            done = at + 1;
            num_forced += 1;
        }
        num_forced
    }
}
