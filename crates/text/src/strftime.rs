//! Today's date for chat templates that state it (`strftime_now`), in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

/// The present moment by `format`.
pub(crate) fn now(format: &str) -> Result<String, String> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
    at(seconds, format)
}

/// A moment, in seconds since 1970, by the directives that templates use; another one is an error that names it.
fn at(seconds: u64, format: &str) -> Result<String, String> {
    let date = Date::of(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let month = MONTHS.get(date.month - 1).copied().unwrap_or_default();
    let weekday = WEEKDAYS.get(date.weekday).copied().unwrap_or_default();
    let short = |name: &str| name.chars().take(3).collect::<String>();
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out.push_str(&date.year.to_string()),
            Some('y') => out.push_str(&format!("{:02}", date.year % 100)),
            Some('m') => out.push_str(&format!("{:02}", date.month)),
            Some('B') => out.push_str(month),
            Some('b') => out.push_str(&short(month)),
            Some('d') => out.push_str(&format!("{:02}", date.day)),
            Some('A') => out.push_str(weekday),
            Some('a') => out.push_str(&short(weekday)),
            Some('H') => out.push_str(&format!("{hour:02}")),
            Some('M') => out.push_str(&format!("{minute:02}")),
            Some('S') => out.push_str(&format!("{second:02}")),
            Some('%') => out.push('%'),
            Some(other) => return Err(format!("strftime_now does not know %{other}")),
            None => out.push('%'),
        }
    }
    Ok(out)
}

struct Date {
    year: u64,
    /// 1 to 12.
    month: usize,
    day: u64,
    /// 0 is Monday.
    weekday: usize,
}

impl Date {
    /// The Gregorian date so many days after 1970-01-01, by counting whole years and months.
    fn of(days: u64) -> Date {
        // 1970-01-01 was a Thursday.
        let weekday = ((days + 3) % 7) as usize;
        let mut rest = days;
        let mut year = 1970;
        while rest >= days_of_year(year) {
            rest -= days_of_year(year);
            year += 1;
        }
        let mut month = 1;
        while month < 12 && rest >= days_of_month(year, month) {
            rest -= days_of_month(year, month);
            month += 1;
        }
        Date { year, month, day: rest + 1, weekday }
    }
}

fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400)
}

fn days_of_year(year: u64) -> u64 {
    if is_leap(year) { 366 } else { 365 }
}

fn days_of_month(year: u64, month: usize) -> u64 {
    match month {
        2 if is_leap(year) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::at;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(at(0, "%A %d %B %Y %H:%M:%S").unwrap(), "Thursday 01 January 1970 00:00:00");
        // Checked with `date -u -d @...`.
        assert_eq!(at(951_782_399, "%Y-%m-%d %a").unwrap(), "2000-02-28 Mon");
        assert_eq!(at(951_782_400, "%d %b %y").unwrap(), "29 Feb 00");
        assert_eq!(at(1_735_689_599, "%d %b %Y %H:%M:%S").unwrap(), "31 Dec 2024 23:59:59");
        assert_eq!(at(4_107_542_400, "%A, %B %d, %Y").unwrap(), "Monday, March 01, 2100");
    }

    #[test]
    fn unknown_directives_are_named() {
        assert_eq!(at(0, "100%% %").unwrap(), "100% %");
        assert!(at(0, "%j").unwrap_err().contains("%j"));
    }
}
