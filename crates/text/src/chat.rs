//! Chat templates: Jinja as model files carry it.

use std::sync::Arc;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value, context};
use serde::Serialize;

use crate::{TextError, python_json, strftime};

/// Steps a template may take, far above any real one; bounds a template that loops over a huge range.
const MAX_TEMPLATE_STEPS: u64 = 20_000_000;
const NAME: &str = "chat";

/// One message of a conversation, as templates see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, or whatever else the model's template knows.
    pub role: String,
    /// What was said.
    pub content: String,
    /// Who said it, where a conversation has several of one role.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Message {
    /// A message without a name.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message { role: role.into(), content: content.into(), name: None }
    }
}

/// A compiled template, or why there is none.
pub(crate) struct ChatTemplate {
    state: State,
    bos_token: String,
    eos_token: String,
}

enum State {
    Ready(Box<Environment<'static>>),
    Absent,
    Bad(String),
}

impl ChatTemplate {
    /// A template that does not compile is kept as such: a model without chat still completes plain prompts.
    pub(crate) fn new(source: Option<&str>, bos_token: String, eos_token: String) -> ChatTemplate {
        let state = match source {
            None => State::Absent,
            Some(source) => match compile(source) {
                Ok(environment) => State::Ready(Box::new(environment)),
                Err(error) => State::Bad(one_line(&error)),
            },
        };
        ChatTemplate { state, bos_token, eos_token }
    }

    pub(crate) fn is_usable(&self) -> bool {
        matches!(self.state, State::Ready(_))
    }

    pub(crate) fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<String, TextError> {
        let environment = match &self.state {
            State::Ready(environment) => environment,
            State::Absent => return Err(TextError::NoChatTemplate),
            State::Bad(reason) => return Err(TextError::BadChatTemplate { reason: reason.clone() }),
        };
        environment
            .get_template(NAME)
            .and_then(|template| {
                template.render(context! {
                    messages => Serde(messages),
                    add_generation_prompt,
                    bos_token => self.bos_token.clone(),
                    eos_token => self.eos_token.clone(),
                    // Templates ask for these with `is none` and with `if`.
                    tools => Value::from(()),
                    documents => Value::from(()),
                })
            })
            .map_err(|error| TextError::Template { reason: one_line(&error) })
    }
}

/// Compiles with the settings that published templates are written for: blocks swallow their line's whitespace,
/// Python's string methods exist.
fn compile(source: &str) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_fuel(Some(MAX_TEMPLATE_STEPS));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |format: Arc<str>| {
        strftime::now(&format).map_err(|message| Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_filter("tojson", python_json::filter);
    environment.add_template_owned(NAME, source.to_owned())?;
    Ok(environment)
}

/// The cause in a line: a template's own words where it raised them.
fn one_line(error: &Error) -> String {
    let text = match error.detail() {
        Some(detail) => detail.to_owned(),
        None => error.to_string(),
    };
    text.lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str, messages: &[Message]) -> Result<String, TextError> {
        ChatTemplate::new(Some(source), "<s>".to_owned(), "</s>".to_owned()).render(messages, true)
    }

    fn ok(source: &str) -> String {
        let messages = [Message::new("system", " Be brief. "), Message::new("user", "Grüße <b> & 'you'")];
        render(source, &messages).unwrap()
    }

    #[test]
    fn templates_see_what_they_expect() {
        assert_eq!(ok("{{ bos_token }}{{ messages|length }}{{ eos_token }}"), "<s>2</s>");
        assert_eq!(
            ok("{{ messages[0]['content'].strip() }}|{{ messages[0].role.upper() }}"),
            "Be brief.|SYSTEM"
        );
        assert_eq!(ok("{% if tools is none and not documents %}plain{% endif %}"), "plain");
        assert_eq!(ok("{% if add_generation_prompt %}go{% endif %}"), "go");
        assert_eq!(ok("{% if messages[0].name is defined %}named{% else %}nameless{% endif %}"), "nameless");
        assert_eq!(ok("{{ messages[-1].content.split(' ')[0] }}"), "Grüße");
    }

    #[test]
    fn whitespace_follows_published_templates() {
        let source = "{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}";
        assert_eq!(ok(source), "user\n");
        assert_eq!(
            ok(
                "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}"
            ),
            "user"
        );
    }

    #[test]
    fn nothing_is_escaped() {
        assert_eq!(ok("{{ messages[1].content }}"), "Grüße <b> & 'you'");
        assert_eq!(
            ok("{{ messages[1]|tojson }}"),
            r#"{"role": "user", "content": "Grüße <b> & 'you'"}"#,
            "keys in order, Python's separators"
        );
        assert_eq!(ok("{{ [1, 2]|tojson(indent=2) }}"), "[\n  1,\n  2\n]");
    }

    #[test]
    fn a_templates_own_refusal_is_the_clients_error() {
        let source = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}";
        let error = render(source, &[Message::new("system", "x")]).unwrap_err();
        assert!(
            matches!(&error, TextError::Template { reason } if reason == "System role not supported"),
            "{error}"
        );
        let error = render("{{ messages[0].content + 1 }}", &[Message::new("user", "x")]).unwrap_err();
        assert!(matches!(error, TextError::Template { .. }), "{error:?}");
        assert!(!error.to_string().contains('\n'));
    }

    #[test]
    fn dates_are_at_hand() {
        let year: u32 = ok("{{ strftime_now('%Y') }}").parse().unwrap();
        assert!(year >= 2024);
        assert!(matches!(render("{{ strftime_now('%Q') }}", &[]), Err(TextError::Template { .. })));
    }

    #[test]
    fn a_template_that_never_ends_is_stopped() {
        let source = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i * j %}{% endfor %}{% endfor %}";
        assert!(matches!(render(source, &[]), Err(TextError::Template { .. })));
    }

    #[test]
    fn no_template_and_a_bad_one_are_told_apart() {
        let none = ChatTemplate::new(None, String::new(), String::new());
        assert!(matches!(none.render(&[], true), Err(TextError::NoChatTemplate)) && !none.is_usable());
        let bad = ChatTemplate::new(Some("{% for %}"), String::new(), String::new());
        assert!(matches!(bad.render(&[], true), Err(TextError::BadChatTemplate { .. })) && !bad.is_usable());
    }
}
