//! Byte sizes on the command line.

use std::fmt;
use std::str::FromStr;

/// A number of bytes, written with an optional binary suffix: `1048576`, `512K`, `64M`, `2G`, `1T` (also `KiB`, ...).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

const SUFFIXES: [(char, u32); 4] = [('K', 10), ('M', 20), ('G', 30), ('T', 40)];

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || {
            format!("'{text}' is not a byte size: a whole number with K, M, G or T behind it, such as 512M")
        };
        let trimmed = text.trim();
        let end = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
        let (digits, suffix) = trimmed.split_at(end);
        let number: u64 = digits.parse().map_err(|_| bad())?;
        let mut letters = suffix.trim_start().chars();
        let shift = match letters.next().map(|c| c.to_ascii_uppercase()) {
            None => 0,
            Some('B') if letters.as_str().is_empty() => 0,
            Some(letter) => {
                let (_, shift) = SUFFIXES.iter().find(|(name, _)| *name == letter).ok_or_else(bad)?;
                match letters.as_str() {
                    "" | "B" | "b" | "iB" | "ib" => *shift,
                    _ => return Err(bad()),
                }
            }
        };
        let bytes =
            number.checked_mul(1 << shift).ok_or_else(|| format!("'{text}' is more than 2^64 bytes"))?;
        if bytes == 0 {
            return Err(format!("'{text}': a byte size must be at least 1"));
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for ByteSize {
    /// The largest suffix that leaves at most one decimal: `1.5 GiB`, `64 MiB`, `100 B`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (letter, shift) in SUFFIXES.iter().rev() {
            let unit = 1u64 << shift;
            if self.0 >= unit {
                let tenths = (self.0 / (unit / 16) * 10) / 16;
                return match tenths % 10 {
                    0 => write!(f, "{} {letter}iB", tenths / 10),
                    rest => write!(f, "{}.{rest} {letter}iB", tenths / 10),
                };
            }
        }
        write!(f, "{} B", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_suffix() {
        for (text, bytes) in [
            ("1", 1),
            ("1048576", 1 << 20),
            ("512K", 512 << 10),
            ("64m", 64 << 20),
            ("2G", 2 << 30),
            ("2GiB", 2 << 30),
            ("2 GB", 2 << 30),
            ("3T", 3 << 40),
            ("100B", 100),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn bad_sizes_are_refused_with_the_text_given() {
        for text in
            ["", "G", "-1", "1.5G", "1X", "1KK", "0", "0G", "1e9", "99999999999999999999", "16777216T", "1 1"]
        {
            let error = text.parse::<ByteSize>().unwrap_err();
            assert!(error.contains(&format!("'{text}'")), "{error}");
        }
    }

    #[test]
    fn sizes_print_short() {
        for (bytes, text) in [
            (100, "100 B"),
            (1 << 10, "1 KiB"),
            (3 << 29, "1.5 GiB"),
            (64 << 20, "64 MiB"),
            (u64::MAX, "16777215.9 TiB"),
        ] {
            assert_eq!(ByteSize(bytes).to_string(), text);
        }
    }
}
